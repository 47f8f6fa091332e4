"""Hands what is noted to the publisher, on a thread of its own, and tells all anew where something was lost."""

from __future__ import annotations

import itertools
import os
import threading
from collections import deque

import numpy as np

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import (
    Forgotten,
    GpuForgotten,
    StoreChanged,
    StoreDetached,
    StoreHeard,
    StoreNewsTaken,
    TierLost,
)
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.errors import ConfigError, LifeCycleError
from fastdeploy_cache.events.feed.owner import PublisherOwner
from fastdeploy_cache.events.feed.tap import EventTap
from fastdeploy_cache.events.journal import Note, RecordTag, encode_notes
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.publisher.setup import PublisherSetup
from fastdeploy_cache.events.query_token import read_token
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.metrics.event_metrics import PublishedCounts
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks
from fastdeploy_cache.transfer_manager.process.client import Processes, config_beside
from fastdeploy_cache.transfer_manager.process.owner import ProcessKind
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

logger = event_log(__name__)

_GATHER_SECONDS = 0.005  # from the first note to the message that brings it
_IDLE_SECONDS, _FAILED_SECONDS = 60.0, 1.0
_TURN_BYTES = 2**19  # of tokens that one turn copies: a tenth of a millisecond of the lock
_TURN_RUNS = 64  # that one turn tells
_MOST_IN_FLIGHT = 4  # messages to the publisher
_MOST_STORE_NOTES = 512  # that wait, of 128 KiB at most
_TASK_SECONDS = 20.0
_START_SECONDS = 30.0
_NO_IDS = np.empty(0, np.int32)


class EventFeed:
    """The publisher's process, and the thread that feeds it. `start` and `close` by one thread; the rest by any.

    What the tap remembers is taken a few milliseconds later, packed, and sent as a task of which a few are in flight.
    If one fails, the publisher has died or is another one: what it knew is gone. If more changes of shape wait than
    may, they are dropped. In both cases all is told anew, from a `Began` on, while the cache goes on.
    """

    def __init__(self, config: CacheConfig, books: Books) -> None:
        """Raises `ConfigError`: the token cannot be read, or names of this kind cannot be made."""
        assert config.events is not None
        self._events, self._books, self._clock = config.events, books, books.clock
        self._scheme = _scheme_of(self._events, config.block_size)
        self._scheme.names()
        self._endpoints = self._events.endpoints(config.transfer.data_parallel_id)
        self._token = read_token(self._events.query_token_file)
        layout = config.rank_layout()
        self._rows = tuple(layout.rows[1:]) if layout is not None else ()
        self._transfer = config_beside(config.transfer, tp_size=1, start_timeout_seconds=_START_SECONDS)
        self._wake = self._clock.event()
        self.tap = EventTap(books.tree, self._wake.set, self._events.max_waiting_changes)
        kind = ProcessKind(name="events", is_optional=True)
        self._processes = Processes(self._transfer, kind, PublisherOwner(self._transfer, self._new_setup), self._clock)
        self._thread: threading.Thread | None = None
        self._task_ids = itertools.count(1)
        self._num_sent = self._num_in_flight = self._num_dropped = self._sequence = 0
        self._answers: deque[TransferResult] = deque()  # put by the I/O thread
        self._is_new = self._is_closing = False  # the publisher knows nothing yet
        self._listener = 0  # to the store: another one, which is told all, whenever all is told anew
        self._of_store: deque[Note] = deque()  # put under the lock
        self._is_owed = False  # it is to be told that all of that was taken

    def _new_setup(self, incarnation: int, queue_fds: tuple[int, ...], signal_fd: int) -> PublisherSetup:
        events, data_parallel_id = self._events, self._transfer.data_parallel_id
        endpoint, replay_endpoint = self._endpoints
        return PublisherSetup(
            rank=0,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_fds=queue_fds,
            signal_fd=signal_fd,
            heartbeat_seconds=self._transfer.heartbeat_seconds,
            endpoint=endpoint,
            replay_endpoint=replay_endpoint,
            topic=events.topic,
            keys_folder=events.keys_folder,
            data_parallel_rank=data_parallel_id,
            scheme=self._scheme,
            rows=self._rows,
            num_kept=events.num_kept_messages,
            kept_bytes=events.kept_bytes,
            interval_seconds=events.heartbeat_seconds,
            token=self._token,
        )

    def start(self) -> None:
        """Start the publisher. One that is late, or dies, is started again and again.

        Raises:
            ConfigError: it refuses its settings, or an address cannot be had.
        """
        with self._books:
            self.tap.hang()
        for change in (Forgotten, GpuForgotten, TierLost):  # whatever may have reset the tree
            self._books.listen(change, lambda _: self.tap.note_forgotten())
        self._books.listen(StoreChanged, self._on_store)
        self._books.listen(StoreDetached, self._on_detached)
        callbacks = Callbacks(self._on_result, on_ready=self._on_ready)
        io = self._processes.start(callbacks, _START_SECONDS)
        if io.start_failure is not None:
            self.close()
            raise ConfigError(f"events.endpoint {self._events.endpoint!r} cannot be used: {io.start_failure}")
        self._thread = threading.Thread(target=self._run, name="event-feed", daemon=True)
        self._thread.start()

    def counts(self) -> PublishedCounts:
        """What was published so far."""
        return PublishedCounts(self._sequence, self.tap.num_records, self.tap.num_begun, self.tap.num_dropped)

    def statuses(self) -> list[RankStatus]:
        """The publisher's process."""
        return self._processes.statuses()

    def close(self) -> None:
        """End the publisher. What was noted last may not have been told. Safe to call twice."""
        self._is_closing = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._processes.stop()

    # -- the thread

    def _run(self) -> None:
        while not self._is_closing:
            is_idle = not self._wake.wait(_IDLE_SECONDS)
            if self._is_closing:
                return
            self._wake.clear()
            self._clock.sleep(_GATHER_SECONDS)
            try:
                if is_idle and self._listener:  # a store may have lost something by itself, or have failed to answer
                    with self._books:
                        self._books.note(StoreHeard(listener=self._listener))
                self.turn()
            except (LifeCycleError, MemoryError, ValueError) as error:  # another thread's turn does not end, or so
                logger.warning("event=events_failed error=%r action=tell_all_anew", error)
                self._is_new = True
                self._clock.sleep(_FAILED_SECONDS)
                self._wake.set()

    def turn(self) -> None:
        """Send what the publisher takes now. The thread's; a simulation calls it by itself."""
        self._hear()
        if self.tap.num_dropped > self._num_dropped:
            self._num_dropped, self._is_new = self.tap.num_dropped, True
            logger.warning("event=events_dropped max=%d action=tell_all_anew", self._events.max_waiting_changes)
        if self._is_new and not self._begin():
            return
        while (self.tap.is_behind or self._of_store) and self._num_in_flight < _MOST_IN_FLIGHT:
            with self._books:
                notes = self.tap.take(_TURN_RUNS, _TURN_BYTES)
            num_bytes = 0
            while self._of_store and num_bytes < _TURN_BYTES:  # behind `Began`, which comes with the first records
                notes.append(self._of_store.popleft())
                num_bytes += sum([len(part) for part in notes[-1] if isinstance(part, bytes)])
                self._is_owed = True
            if notes:
                self._submit(notes)
        if self._is_owed and not self._of_store and not self._num_in_flight:
            self._is_owed = False
            with self._books:
                self._books.note(StoreNewsTaken())

    def tell_anew(self) -> None:
        """Whatever the publisher knows, tell it all that is cached from the begin."""
        self._is_new = True
        self._wake.set()

    def _hear(self) -> None:
        while self._answers:
            result = self._answers.popleft()
            self._num_in_flight -= 1
            if result.error is None:
                self._sequence = (result.ranks[0].counts or {}).get("sequence", self._sequence)
            elif self.tap.is_on:
                logger.info("event=events_lost reason=%r action=tell_all_anew", result.error)
                self._stop_telling()

    def _stop_telling(self) -> None:
        """What the publisher knows, or will hear, has a gap: nothing of it counts before it has heard all anew."""
        self._is_new = True  # first: the lock may not be had
        with self._books:
            self.tap.deafen()

    def _begin(self) -> bool:
        """Begin anew, once what was sent before has been answered; whether it has been."""
        if self._num_in_flight or not self._processes.has_room(TaskKind.PUBLISH):
            return False
        self._is_new = False  # first: what comes in between counts again
        try:
            with self._books:
                self.tap.begin()
                self._of_store.clear()
                self._listener += 1
                self._books.note(StoreHeard(listener=self._listener))
        except BaseException:
            self._is_new = True
            raise
        return True

    def _submit(self, notes: list[Note]) -> None:
        detail = encode_notes(self._num_sent, notes)
        self._num_sent += 1
        self._num_in_flight += 1
        self._processes.submit(
            TransferTask(
                task_id=next(self._task_ids),
                kind=TaskKind.PUBLISH,
                source_ids=_NO_IDS,
                destination_ids=_NO_IDS,
                deadline=self._clock.now() + _TASK_SECONDS,
                detail=detail,
            )
        )

    # -- the end of a turn

    def _on_store(self, change: StoreChanged) -> None:
        news = change.news
        if news.listener == self._listener:
            self._note_of_store((int(RecordTag.STORE), change.rank, change.num_ranks, *news[1:-1]))

    def _on_detached(self, _: StoreDetached) -> None:
        self._of_store.clear()  # whatever it has said
        self._note_of_store((int(RecordTag.STORE_GONE),))

    def _note_of_store(self, note: Note) -> None:
        if len(self._of_store) >= _MOST_STORE_NOTES:
            self.tell_anew()
            return
        self._of_store.append(note)
        self._wake.set()

    # -- the I/O thread of the process

    def _on_result(self, result: TransferResult) -> None:
        self._answers.append(result)
        self._wake.set()

    def _on_ready(self) -> None:
        """The publisher is ready: the first one, or another one in its place, which knows nothing.

        Its predecessor's tasks have failed before: `_hear` finds them first.
        """
        self._is_new = True
        self._wake.set()


def _scheme_of(events: EventsConfig, block_size: int) -> NameScheme:
    return NameScheme(kind=events.block_names, form=events.name_form, seed=events.hash_seed, block_size=block_size)
