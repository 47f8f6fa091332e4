"""Listeners to a cache's events in a simulation: messages get lost or come twice, publishers die and come again."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.checkpoint import chain_of
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.events.feed.tap import EventTap
from fastdeploy_cache.events.follower import Follower, ReplayFrom
from fastdeploy_cache.events.index import BlockIndex
from fastdeploy_cache.events.journal import decode_delivery, encode_notes
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.publisher.answers import Answers
from fastdeploy_cache.events.publisher.setup import PublisherSetup
from fastdeploy_cache.events.publisher.tree import ToldTree
from fastdeploy_cache.events.questions import Answer
from fastdeploy_cache.events.wire import MEDIA, BlockName, BlockRemoved, BlockStored, Event, encode_batch
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.launch.faults.told_stores import Known, ToldStores
from fastdeploy_cache.transfer_manager.kv.groups import Row

Units = dict[tuple[int, BlockName], int]
_NUM_KEPT = 12  # messages that a publisher sends again
_MOST_STATES, _MOST_WAITING = 400, 12
_QUIET_EVERY, _BEGIN_EVERY = 60, 97


class _Publisher:
    """One lifetime of a publisher, and what was known to it behind each of its messages."""

    def __init__(self, epoch: int, scheme: NameScheme, rows: Sequence[Row]) -> None:
        setup = PublisherSetup(
            rank=0, incarnation=epoch, engine_pid=0, queue_fds=(), signal_fd=-1, heartbeat_seconds=1.0,
            endpoint="", replay_endpoint="", topic="", keys_folder=None, data_parallel_rank=0, scheme=scheme,
            rows=tuple(rows), num_kept=_NUM_KEPT, kept_bytes=2**20, interval_seconds=1.0, token=None,
        )  # fmt: skip
        self.tree, self.index = ToldTree(scheme, rows), BlockIndex()
        self.answers = Answers(self.tree, setup, epoch, SYSTEM_CLOCK)
        self.epoch, self.next_sequence = epoch, 0
        self.kept = deque[tuple[int, bytes]](maxlen=_NUM_KEPT)
        self.states = dict[int, Known]()

    def publish(self, events: Sequence[Event]) -> tuple[int, bytes]:
        """Send a message; returns it."""
        for event in events:
            self._look_at(event)
            self.index.apply(event)
        message = self.next_sequence, encode_batch(0.0, events, 0)
        self.next_sequence += 1
        self.kept.append(message)
        self.states[message[0]] = known_to(self.index)
        self.states.pop(message[0] - _MOST_STATES, None)
        return message

    def _look_at(self, event: Event) -> None:
        """An event says something new, names no block twice, and comes behind its parent."""
        if not isinstance(event, BlockStored | BlockRemoved):
            return
        names, group = event.block_hashes, event.group_idx
        assert names and len(set(names)) == len(names), "an event names a block twice, or none"
        blocks, units = known_to(self.index)
        bit = 1 << MEDIA.index(event.medium or "")
        for name in names:
            there = units.get((group, name), 0) if group else blocks.get(name, 0)
            assert bool(there & bit) == isinstance(event, BlockRemoved), "an event says what was known already"
        if isinstance(event, BlockStored):
            assert len(event.token_ids) == len(names) * event.block_size, "an event without all of its tokens"
            parent = event.parent_block_hash
            assert parent is None or parent in blocks, "a block is told before its parent"


class _Listener:
    """A follower, what is on its way to it, and what it has asked."""

    def __init__(self, publisher: _Publisher) -> None:
        self.follower, self.publisher = Follower(), publisher
        self.coming = deque[tuple[int, bytes]]()
        self.asked = deque[object]()

    def connect(self, publisher: _Publisher) -> None:
        """The publisher has died, and another one is there: what was on its way is gone."""
        self.publisher = publisher
        self.coming.clear()
        self.asked.clear()
        self.follower.on_disconnected()

    def hear(self) -> None:
        """The next message arrives."""
        if self.coming:
            self.follower.on_message(*self.coming.popleft())

    def ask(self) -> None:
        """Send what is to be asked now."""
        if (question := self.follower.take_question()) is not None:
            self.asked.append(question)

    def answer(self) -> None:
        """The publisher answers the first question."""
        if not self.asked:
            return
        question, publisher, follower = self.asked.popleft(), self.publisher, self.follower
        if isinstance(question, ReplayFrom):
            for sequence, payload in list(publisher.kept):
                if sequence >= question.start:
                    follower.on_replayed(sequence, payload)
            follower.on_replay_end()
        else:
            data = publisher.answers.answer(encode(question), publisher.next_sequence)  # type: ignore[arg-type]
            answer: Answer = decode(data, Answer)
            follower.on_answer(answer)


class Listeners:
    """A further oracle of a simulation: see `Watch`. Each `check` is a moment in which something happens to them.

    Whoever says that it is current knows exactly what the publisher knew behind the last message that came; and in a
    quiet moment, when all is told and nothing gets lost, all of them know what is in the tree.
    """

    def __init__(self, tree: PrefixTree, rows: Sequence[Row] = (), *, seed: int = 0, num_moments: int = 1) -> None:
        """`num_moments`: of each `check`."""
        self._num_moments = num_moments
        self._tree, self._rows, self._random = tree, tuple(rows), random.Random(seed)  # noqa: S311
        self._scheme = NameScheme(block_size=tree.block_size)
        self.tap = EventTap(tree, lambda: None, _MOST_WAITING)
        self.tap.hang()
        self.num_looks = self.num_restarts = self.num_lost = self.num_quiet = 0
        self.stores = ToldStores(tree, self._rows, self._random)
        self._publisher = self._new_publisher()
        self._listeners = [_Listener(self._publisher)]

    def _new_publisher(self) -> _Publisher:
        self.num_restarts += 1
        self._begin()
        return _Publisher(self.num_restarts, self._scheme, self._rows)

    def check(self) -> None:
        """Something happens. Raises `AssertionError` where somebody knows what is not so."""
        for _ in range(self._num_moments):
            self._live()

    def _live(self) -> None:
        self.num_looks += 1
        draw = self._random.random
        if self.num_looks % _BEGIN_EVERY == 0 or not self.tap.is_on:  # too much was waiting
            self._begin()
        self.stores.live()
        if draw() < 0.4:
            self._publish()
        for listener in self._listeners:
            self._happen_to(listener)
        if draw() < 0.01:
            self._publisher = self._new_publisher()
            for listener in self._listeners:
                listener.connect(self._publisher)
        if draw() < 0.01:
            self._listeners = [*self._listeners[-1:], _Listener(self._publisher)]
        if self.num_looks % _QUIET_EVERY == 0:
            self._be_quiet()

    def _begin(self) -> None:
        """All is told anew, of the stores, too."""
        self.tap.begin()
        self.stores.begin()

    def _take(self) -> None:
        """A record or two, so that some runs are told while others have changed again."""
        notes = self.tap.take(self._random.randrange(1, 4), 2**20)
        delivery = decode_delivery(encode_notes(0, notes + self.stores.take()))
        for record in delivery.records:
            self._publisher.tree.apply(record)

    def _publish(self) -> None:
        self._take()
        message = self._publisher.publish(self._publisher.tree.take())  # may be a heartbeat
        for listener in self._listeners:
            chance = self._random.random()
            if chance < 0.05:
                self.num_lost += 1
                continue
            listener.coming.append(message)
            if chance > 0.95:
                listener.coming.append(message)

    def _happen_to(self, listener: _Listener) -> None:
        chance = self._random.random()
        if chance < 0.4:
            listener.hear()
        elif chance < 0.7:
            listener.ask()
            listener.answer()
        elif chance < 0.72:
            listener.follower.on_silence()
            listener.asked.clear()
        self._look_at(listener)

    @staticmethod
    def _look_at(listener: _Listener) -> None:
        follower = listener.follower
        if follower.is_current and follower.last_sequence >= 0:
            assert follower.epoch == listener.publisher.epoch, "a listener follows a publisher that is gone"
            states = listener.publisher.states
            if follower.last_sequence in states:
                assert known_to(follower.index) == states[follower.last_sequence], "a listener knows what is not so"

    def _be_quiet(self) -> None:
        """All is told, and nothing gets lost any more."""
        self.num_quiet += 1
        if not self.tap.is_on:
            self._begin()
        self.stores.be_quiet()
        self._take()  # a reset is found by it, where nothing else has said so
        while self.tap.is_behind or self.stores.is_behind:
            self._take()
        for _ in range(2):
            message = self._publisher.publish(self._publisher.tree.take())
            for listener in self._listeners:
                listener.coming.append(message)
        expected = expected_of(self._tree, self._rows)
        self.stores.check(expected, known_to(self._publisher.index))
        assert known_to(self._publisher.index) == expected, "events tell something else than the tree has"
        for listener in self._listeners:
            while listener.coming or not listener.follower.is_current:
                if listener.follower.is_refused:  # there were too many snapshots; it asks again after a while
                    listener.follower.on_silence()
                listener.hear()
                listener.ask()
                listener.answer()
            self._look_at(listener)
            assert known_to(listener.follower.index) == expected, "a listener knows something else than the tree has"


def expected_of(tree: PrefixTree, rows: Sequence[Row] = ()) -> Known:
    """What is in a tree, by its own fields."""
    blocks, units = dict[BlockName, int](), Units()
    size, hasher = tree.block_size, BlockHasher(tree.block_size)
    stack = [(run, root_hash(name, size), b"") for name, root in tree.roots.items() for run in root.children.values()]
    while stack:
        run, parent, before = stack.pop()
        joined = hasher.extend(parent, run.tokens, 0, run.num_blocks, run.extras)
        for place in range(run.num_blocks):
            bits = (place < run.num_gpu) + 2 * (run.cpu_start <= place < run.cpu_end)
            blocks[joined[place * HASH_BYTES : (place + 1) * HASH_BYTES]] = bits
        _add_units(run, before + joined, rows, units)
        stack.extend((child, joined[-HASH_BYTES:], before + joined) for child in run.children.values())
    return blocks, units


def _add_units(run: Run, whole: bytes, rows: Sequence[Row], units: Units) -> None:
    for checkpoint in chain_of(run):
        bits = (checkpoint.units is not None) + 2 * (checkpoint.pages is not None)
        for number, row in enumerate(rows, start=1):
            for block in range(row.first_block(checkpoint.boundary), checkpoint.boundary):
                key = number, whole[block * HASH_BYTES : (block + 1) * HASH_BYTES]
                units[key] = units.get(key, 0) | bits


def known_to(index: BlockIndex) -> Known:
    """What an index says of every block and unit, as bits of media."""
    return dict(index.blocks), dict(index.units)
