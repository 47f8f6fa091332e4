"""What a publisher answers to those who ask it."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.index import BlockIndex
from fastdeploy_cache.events.names import name_blocks
from fastdeploy_cache.events.publisher.setup import PublisherSetup
from fastdeploy_cache.events.publisher.snapshots import KeptSnapshots
from fastdeploy_cache.events.publisher.stretch import groups_of
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.questions import (
    Answer,
    AskPiece,
    AskPrefix,
    AskSnapshot,
    PrefixAnswer,
    PublisherState,
    Question,
    Refusal,
    SnapshotPiece,
    number_in,
)
from fastdeploy_cache.events.wire import Event, encode_batch
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.ipc.codec import decode, encode

_MOST_BYTES = 2**20  # of a question


class Answers:
    """Answers from the told tree, as it is when a question comes. One thread."""

    def __init__(self, tree: ToldTree, setup: PublisherSetup, epoch: int, clock: Clock) -> None:
        """`epoch`: of this lifetime of the publisher."""
        self._tree, self._setup, self._epoch, self._clock = tree, setup, epoch, clock
        self._naming = setup.scheme.names()
        self._index = BlockIndex(groups_of(setup.rows)) if setup.token is not None else None
        self._snapshots = KeptSnapshots(tree.stored, setup.scheme.block_size)

    def take_in(self, events: Sequence[Event]) -> None:
        """These are about to be published."""
        if self._index is not None:
            for event in events:
                self._index.apply(event)

    def drop_idle(self) -> None:
        """Forget snapshots that nobody asks for any more."""
        self._snapshots.drop_idle(self._clock.now())
        if not len(self._snapshots):
            self._tree.thaw()

    def answer(self, data: bytes, next_sequence: int) -> bytes:
        """The answer to what somebody asks, whatever that is."""
        if len(data) > _MOST_BYTES:
            return encode(Refusal(number=0, reason=f"the question has {len(data)} bytes; {_MOST_BYTES} are the most"))
        try:
            question: Question = decode(data, Question)
        except CodecError as error:
            reason = str(error.__cause__ or error)[:200]
            return encode(Refusal(number=number_in(data), reason=f"this is no question: {reason}"))
        try:
            answer = self._answer_to(question, next_sequence)
        except LookupError:
            answer = Refusal(number=question.number, reason="there is no such piece now, or too many take snapshots")
        except ValueError as error:
            answer = Refusal(number=question.number, reason=str(error))
        return encode(answer)

    def _answer_to(self, question: Question, next_sequence: int) -> Answer:
        now = self._clock.now()
        if isinstance(question, AskPiece):
            events, is_last = self._snapshots.piece(question.snapshot, question.piece, now)
            payload = encode_batch(self._clock.unix(), events, self._setup.data_parallel_rank)
            at = question.snapshot, question.piece
            return SnapshotPiece(number=question.number, snapshot=at[0], piece=at[1], payload=payload, is_last=is_last)
        if isinstance(question, AskPrefix):
            return self._prefix(question)
        snapshot = None
        if isinstance(question, AskSnapshot):
            self._snapshots.check_room(now)
            snapshot = self._snapshots.begin(self._tree.freeze(), now)
        return PublisherState(
            number=question.number,
            epoch=self._epoch,
            sequence=next_sequence,
            scheme=self._setup.scheme,
            heartbeat_seconds=self._setup.interval_seconds,
            topic=self._setup.topic,
            groups=groups_of(self._setup.rows),
            snapshot=snapshot,
        )

    def _prefix(self, question: AskPrefix) -> Answer:
        token = self._setup.token
        if self._index is None or token is None:
            raise ValueError("this publisher answers no questions about prompts; set events.query_token_file")
        if not hmac.compare_digest(question.token.encode(), token.encode()):
            raise ValueError("the token is wrong")
        if (question.token_ids is None) == (question.names is None):
            raise ValueError("give either token_ids or names")
        if question.token_ids is not None and question.namespace is None:
            raise ValueError("give the namespace of the token_ids; that of most prompts is empty")
        names = question.names
        if question.token_ids is not None:
            names = [*name_blocks(self._setup.scheme, self._naming, question.token_ids, question.namespace or "")]
        found = self._index.find(names or [], self._setup.scheme.block_size)
        return PrefixAnswer(
            number=question.number,
            num_tokens=found.num_tokens,
            num_gpu_tokens=found.num_gpu_tokens,
            num_cpu_tokens=found.num_cpu_tokens,
            num_disk_tokens=found.num_disk_tokens,
        )
