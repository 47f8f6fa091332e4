"""Follows a publisher from any moment on, over losses and restarts: what it heard, what it knows, what it must ask.

Pure: messages and answers come in, questions go out, and nothing waits.
"""

from __future__ import annotations

import math
from collections import deque
from enum import Enum
from typing import NamedTuple

from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.index import BlockIndex
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.questions import (
    Answer,
    AskPiece,
    AskSnapshot,
    AskState,
    PublisherState,
    Question,
    Refusal,
    SnapshotPiece,
)
from fastdeploy_cache.events.wire import decode_batch

_MOST_HELD = 10_000  # messages that came while a question was open
_MOST_HELD_BYTES = 64 * 2**20
_MOST_BLOCKS = 20_000_000  # of one publisher: some gigabytes


class FollowState(Enum):
    """How much is known.

    ::

        LOST --asks for a snapshot--> FILLING --last piece--> CURRENT
          ^                                                     |  gap: CATCHING, asks for a replay, then CHECKING
          |                                                     |  an earlier sequence: CHECKING, asks for the epoch
          +--- another epoch, a disconnection, a refusal, a gap that no replay closes ---+
    """

    LOST = "lost"
    FILLING = "filling"
    CATCHING = "catching"
    CHECKING = "checking"
    CURRENT = "current"


class ReplayFrom(NamedTuple):
    """Ask for messages again, from this sequence on, in vLLM's way."""

    start: int


class Follower:
    """Says what is cached only while it is CURRENT: then it has taken in every message up to the last that came.

    A message with a later sequence shows that some were lost. One with an earlier sequence came twice, or is of a new
    publisher: its epoch tells. A new publisher may also go on, by chance, where the old one ended; so whoever drives
    this tells of each disconnection before what comes over the next connection.
    """

    def __init__(self, *, keeps_taken: bool = False) -> None:
        """`keeps_taken`: the messages that were taken in wait in `taken` for somebody."""
        self.taken: deque[tuple[int, bytes]] | None = deque() if keeps_taken else None
        self.index = BlockIndex()
        self.state = FollowState.LOST
        self.scheme: NameScheme | None = None
        self.epoch: int | None = None
        self.heartbeat_seconds = 0.0
        self.num_snapshots = self.num_replays = self.num_messages = 0
        self._expected = 0  # the sequence that comes next
        self._held: deque[tuple[int, bytes]] = deque()
        self._num_held_bytes = 0
        self._number = 0  # of the last question
        self._snapshot = self._piece = 0
        self.is_refused = False  # it is asked again later: see `on_silence`
        self._is_silent = False  # nothing is on its way: what the publisher has sent and has not come is lost
        self._question: Question | ReplayFrom | None = None
        self._ask_snapshot()

    @property
    def is_current(self) -> bool:
        """Whether the index is what the publisher had when it sent the last message that came."""
        return self.state is FollowState.CURRENT

    @property
    def last_sequence(self) -> int:
        """The sequence of the last message that was taken in; -1: none was."""
        return self._expected - 1

    def take_question(self) -> Question | ReplayFrom | None:
        """What is to be sent now; once."""
        question, self._question = self._question, None
        return question

    # -- what happens

    def on_disconnected(self) -> None:
        """The connection is gone: what comes next may be of another publisher."""
        self._lose()

    def on_silence(self) -> None:
        """No answer has come for long, or no message: is it the same publisher still?"""
        if self.state is FollowState.CURRENT:
            self._check()
            self._is_silent = True
        else:
            self._lose()

    def on_message(self, sequence: int, payload: bytes) -> None:
        """A message has come. A payload that is no batch is as good as lost."""
        if self.state is FollowState.CURRENT and sequence == self._expected:
            self._apply(sequence, payload)
            return
        self._held.append((sequence, payload))
        self._num_held_bytes += len(payload)
        if len(self._held) > _MOST_HELD or self._num_held_bytes > _MOST_HELD_BYTES:
            self._lose()
        elif self.state is FollowState.CURRENT:
            if sequence > self._expected:
                self._catch_up()
            else:
                self._check()

    def on_replayed(self, sequence: int, payload: bytes) -> None:
        """A message has come again, as it was asked for."""
        if self.state is not FollowState.CATCHING:
            return
        if sequence == self._expected:
            self._apply(sequence, payload)
        elif sequence > self._expected:  # the publisher does not have it any more
            self._lose()

    def on_replay_end(self) -> None:
        """No message comes again any more."""
        if self.state is FollowState.CATCHING:
            self._check()

    def on_answer(self, answer: Answer) -> None:
        """An answer has come; one to another question than the last says nothing."""
        if answer.number != self._number:
            return
        if isinstance(answer, Refusal) or (isinstance(answer, PublisherState) and math.isnan(answer.heartbeat_seconds)):
            self._lose()
            self._question, self.is_refused = None, True
        elif isinstance(answer, PublisherState):
            if self.state is FollowState.LOST and answer.snapshot is not None:
                self._begin_filling(answer, answer.snapshot)
            elif self.state is FollowState.CHECKING:
                self._checked(answer)
        elif isinstance(answer, SnapshotPiece) and self.state is FollowState.FILLING:
            self._fill(answer)

    # -- steps

    def _lose(self) -> None:
        self.index.clear()
        self._held.clear()
        self._num_held_bytes = 0
        self.epoch = None
        self.state = FollowState.LOST
        self._ask_snapshot()

    def _next_number(self) -> int:
        self._number += 1
        return self._number

    def _ask_snapshot(self) -> None:
        self.is_refused = False
        self._question = AskSnapshot(number=self._next_number())

    def _begin_filling(self, answer: PublisherState, snapshot: int) -> None:
        self.state, self._snapshot, self._piece = FollowState.FILLING, snapshot, 0
        self.epoch, self.scheme, self._expected = answer.epoch, answer.scheme, answer.sequence
        self.heartbeat_seconds = answer.heartbeat_seconds
        self.index.clear()
        self.index.groups = dict(answer.groups)
        self._ask_piece()

    def _ask_piece(self) -> None:
        self._question = AskPiece(number=self._next_number(), snapshot=self._snapshot, piece=self._piece)

    def _fill(self, answer: SnapshotPiece) -> None:
        if (answer.snapshot, answer.piece) != (self._snapshot, self._piece) or not self._take_in(answer.payload):
            self._lose()
        elif answer.is_last:
            self.num_snapshots += 1
            self._go_on()
        else:
            self._piece += 1
            self._ask_piece()

    def _catch_up(self) -> None:
        self.state = FollowState.CATCHING
        self.num_replays += 1
        self._question = ReplayFrom(self._expected)

    def _check(self) -> None:
        self.state, self._is_silent = FollowState.CHECKING, False
        self._question = AskState(number=self._next_number())

    def _checked(self, answer: PublisherState) -> None:
        if answer.epoch != self.epoch or answer.sequence < self._expected:
            self._lose()
        else:
            self._go_on()
            if self._is_silent and self.state is FollowState.CURRENT and answer.sequence > self._expected:
                self._catch_up()

    def _go_on(self) -> None:
        """It is the same publisher: take in what was held, as far as that goes."""
        self.state = FollowState.CURRENT
        for sequence, payload in sorted(self._held):
            if sequence == self._expected and self.state is FollowState.CURRENT:
                self._apply(sequence, payload)
        if self.state is not FollowState.CURRENT:
            return
        self._held = deque([held for held in self._held if held[0] > self._expected])
        self._num_held_bytes = sum([len(payload) for _, payload in self._held])
        if self._held:
            self._catch_up()

    def _apply(self, sequence: int, payload: bytes) -> None:
        if self._take_in(payload):
            self._expected = sequence + 1
            self.num_messages += 1
            if self.taken is not None:
                self.taken.append((sequence, payload))
        else:
            self._lose()

    def _take_in(self, payload: bytes) -> bool:
        try:
            batch = decode_batch(payload)
        except CodecError:
            return False
        for event in batch.events:
            self.index.apply(event)
        return len(self.index) <= _MOST_BLOCKS
