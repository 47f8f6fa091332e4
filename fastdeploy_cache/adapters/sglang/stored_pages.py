"""Pages of one host pool in a store, behind a storage process: each call has a deadline, and failures are misses."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.adapters.sglang.staging import Desk, Staging
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.policies.breaker import Breaker
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.storage.client import StorageProcesses
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

logger = event_log(__name__)

_HASHES_PER_LOOKUP = 4096
_HASH_BYTES = 32
_NO_IDS = np.empty(0, np.int32)


class _Flight:
    """A task on its way. `desk` is set when its caller has gone before its end."""

    def __init__(self, ids: Int32Array) -> None:
        self.ids, self.ended = ids, SYSTEM_CLOCK.event()
        self.result: TransferResult | None = None
        self.desk: Desk | None = None

    @property
    def num_blocks(self) -> int:
        """What it came to; 0 where it has failed, or not ended."""
        return self.result.num_blocks if self.result is not None and self.result.error is None else 0


class StoredPages:
    """Any thread may call. Reads and writes go by staging pages; of calls that go one way, one is served at a time.

    No call waits beyond its deadline, by the clock's `now`. A store that fails again and again is left alone: then
    calls miss at once, until a probe (pages of noise, nobody waits for it) has found it working.
    """

    def __init__(self, config: StorageConfig, space: KeySpace, piece_bytes: Sequence[int]) -> None:
        """`piece_bytes`: the sizes of the pieces in which a page lies in the pool.

        Raises:
            ConfigError: there is room for fewer than three pages.
            NotEnoughMemoryError: there is no memory for them.
        """
        self._timeout_seconds = config.task_timeout_seconds
        self._staging = Staging(config.staging_bytes, piece_bytes)
        self.piece_bytes = self._staging.piece_bytes
        self._client = StorageProcesses(config, TransferConfig(), spaces=[space], segments=[self._staging.segment])
        self._lock = threading.Lock()  # for what follows; never held while anything is waited for
        self._flights: dict[int, _Flight] = {}
        self._next_task_id = 1
        self._probe_id: int | None = None
        self._is_closed = False
        self._read_breaker, self._write_breaker = (
            Breaker(config.breaker_failures, config.breaker_seconds) for _ in range(2)
        )

    def start(self) -> None:
        """Open the store. One that cannot be reached in time is tried again and again, and calls miss until then.

        Raises:
            StorageRefusedError: its settings are wrong.
        """
        try:
            self._client.start(self._on_result, lambda: None)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the process, which makes durable what is not, and give the memory back. Safe to call twice."""
        with self._lock:
            was_closed, self._is_closed = self._is_closed, True
        if was_closed:
            return
        self._client.stop()  # answers what is on its way: nobody waits any more
        self._staging.close(self._timeout_seconds)

    def count_leading(self, hashes: Sequence[bytes], deadline: float) -> int:
        """How many of these pages, counted from the first, are there."""
        num_there = 0
        for start in range(0, len(hashes), _HASHES_PER_LOOKUP):
            part = hashes[start : start + _HASHES_PER_LOOKUP]
            result = self._ask(TaskKind.LOOKUP, part, deadline)
            num_there += result.num_blocks if result is not None else 0
            if num_there < start + len(part):
                break
        return num_there

    def read(self, hashes: Sequence[bytes], addresses: Sequence[int], deadline: float) -> int:
        """Fill pages; how many, counted from the first, hold exactly what was written under their hashes. The others
        are as they were. `addresses`: of the pieces, page by page."""
        return self._move(TaskKind.PREFETCH, hashes, addresses, self._staging.reading, deadline)

    def write(self, hashes: Sequence[bytes], addresses: Sequence[int], deadline: float) -> int:
        """Store pages that are not there yet; how many, counted from the first, are there now."""
        return self._move(TaskKind.WRITE, hashes, addresses, self._staging.writing, deadline)

    def clear(self, deadline: float) -> bool:
        """Forget everything of these weights; whether that has been done."""
        return self._ask(TaskKind.CLEAR, (), deadline) is not None

    def _move(
        self, kind: TaskKind, hashes: Sequence[bytes], addresses: Sequence[int], desk: Desk, deadline: float
    ) -> int:
        if not self._can(kind) or not desk.lock.acquire(timeout=max(0.0, deadline - SYSTEM_CLOCK.now())):
            return 0
        num_begun = num_done = 0
        flights: deque[_Flight] = deque()
        try:
            while True:
                is_time = SYSTEM_CLOCK.now() < deadline
                while is_time and len(flights) < len(desk.trays) and num_begun < len(hashes) and self._can(kind):
                    flights.append(self._begin(kind, hashes, addresses, desk, num_begun))
                    num_begun += len(flights[-1].ids)
                if not flights:
                    return num_done
                first = flights[0]
                first.ended.wait(max(0.0, deadline - SYSTEM_CLOCK.now()))
                num_moved = first.num_blocks
                if kind is TaskKind.PREFETCH:
                    self._staging.empty(first.ids[:num_moved], addresses[num_done * len(self.piece_bytes) :])
                num_done += num_moved
                if num_moved < len(first.ids):  # a miss, a failure, or too late
                    return num_done
                flights.popleft()
        finally:
            self._leave(desk, flights)

    def _begin(
        self, kind: TaskKind, hashes: Sequence[bytes], addresses: Sequence[int], desk: Desk, start: int
    ) -> _Flight:
        """A task for the pages from `start` on, as many as a tray takes."""
        part = hashes[start : start + desk.tray_pages]
        ids = desk.trays[start // desk.tray_pages % len(desk.trays)][: len(part)]
        if kind is TaskKind.WRITE:
            self._staging.fill(ids, addresses[start * len(self.piece_bytes) :])
        return self._submit(kind, part, ids)

    def _leave(self, desk: Desk, flights: Sequence[_Flight]) -> None:
        """Give the desk up, to tasks that may yet touch its pages if there are such."""
        with self._lock:
            late = [flight for flight in flights if flight.result is None]
            for flight in late:
                flight.desk = desk
            desk.num_left = len(late)
        if not late:
            desk.lock.release()

    def _ask(self, kind: TaskKind, hashes: Sequence[bytes], deadline: float) -> TransferResult | None:
        """The result of a task that moves no pages here; None where there is none, or an error."""
        if SYSTEM_CLOCK.now() >= deadline or not self._can(kind):
            return None
        flight = self._submit(kind, hashes)
        flight.ended.wait(max(0.0, deadline - SYSTEM_CLOCK.now()))
        result = flight.result
        return result if result is not None and result.error is None else None

    def _submit(self, kind: TaskKind, hashes: Sequence[bytes], ids: Int32Array = _NO_IDS) -> _Flight:
        flight = _Flight(ids)
        with self._lock:
            task = self._new_task(kind, b"".join(hashes), ids)
            self._flights[task.task_id] = flight
        self._client.submit(task)
        return flight

    def _new_task(self, kind: TaskKind, hashes: bytes, ids: Int32Array) -> TransferTask:
        task_id, self._next_task_id = self._next_task_id, self._next_task_id + 1
        return TransferTask(
            task_id=task_id,
            kind=kind,
            source_ids=ids if kind is TaskKind.WRITE else _NO_IDS,
            destination_ids=_NO_IDS if kind is TaskKind.WRITE else ids,
            deadline=SYSTEM_CLOCK.now() + self._timeout_seconds,
            hashes=hashes,
        )

    # -- whether the store works

    def _breaker(self, kind: TaskKind) -> Breaker:
        return self._write_breaker if kind in (TaskKind.WRITE, TaskKind.CLEAR) else self._read_breaker

    def _can(self, kind: TaskKind) -> bool:
        """Whether to give it a task now. Where it was left alone for long enough, a probe is sent."""
        if self._is_closed or not self._client.has_room(kind) or self._client.needs_token_ids:
            return False
        probe = None
        with self._lock:
            breaker = self._breaker(kind)
            if breaker.is_probe_due(SYSTEM_CLOCK.now()) and self._probe_id is None:
                probe = self._new_task(TaskKind.PROBE, SYSTEM_CLOCK.random_bytes(_HASH_BYTES), self._staging.probe_ids)
                self._probe_id = probe.task_id
                for each in (self._read_breaker, self._write_breaker):
                    if not each.is_closed:
                        each.begin_probe()
            is_closed = breaker.is_closed
        if probe is not None:
            self._client.submit(probe)
        return is_closed

    def _on_result(self, result: TransferResult) -> None:
        """The end of a task, on the client's thread or, of one that was refused, on the caller's."""
        with self._lock:
            states = [each.is_closed for each in (self._read_breaker, self._write_breaker)]
            self._judge(result)
            flight, free = self._flights.pop(result.task.task_id, None), None
            if flight is not None:
                flight.result = result
                flight.ended.set()
                if flight.desk is not None:
                    flight.desk.num_left -= 1
                    free = flight.desk if not flight.desk.num_left else None
            changed = states != [each.is_closed for each in (self._read_breaker, self._write_breaker)]
            reading, writing = self._read_breaker.state.name, self._write_breaker.state.name
        if free is not None:
            free.lock.release()
        if changed:
            logger.warning("event=hicache_breaker reading=%s writing=%s error=%r", reading, writing, result.error)

    def _judge(self, result: TransferResult) -> None:
        now, worked = SYSTEM_CLOCK.now(), result.error is None
        if result.task.task_id == self._probe_id:
            self._probe_id = None
            was_tried = worked or result.is_failure
            self._read_breaker.probe_ended(worked if was_tried else None, now)
            self._write_breaker.probe_ended(worked and result.num_blocks > 0 if was_tried else None, now)
        elif worked:
            self._breaker(result.task.kind).succeeded()
        elif result.is_failure:
            self._breaker(result.task.kind).failed(now)
