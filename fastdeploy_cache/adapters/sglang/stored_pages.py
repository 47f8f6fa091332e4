"""Pages of one host pool in a store, behind a storage process: each call has a deadline, and failures are misses."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.policies.breaker import Breaker
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.storage.client import StorageProcesses
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

logger = event_log(__name__)

_MAX_STAGED_PAGES = 128  # each way: what SGLang moves in one call
_HASHES_PER_LOOKUP = 4096
_HASH_BYTES = 32
_NO_IDS = np.empty(0, np.int32)


class _Desk:
    """Staging pages for one way. Whoever holds `lock` has them; a task that outlasts its caller takes the lock over."""

    def __init__(self, first: int, num: int) -> None:
        self.lock = threading.Lock()
        self.ids = np.arange(first, first + num, dtype=np.int32)


class _Flight:
    """A task on its way. `left_with`: its caller has gone at the deadline, and this desk is free when the task ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.result: TransferResult | None = None
        self.left_with: _Desk | None = None


class StoredPages:
    """Any thread may call. Reads and writes go by staging pages that the process shares, since the pool's own memory
    cannot be shared once it is made; of calls that go one way, one is served at a time.

    No call waits beyond `task_timeout_seconds`. A store that fails again and again is left alone: then calls miss at
    once, until a probe (pages of noise, nobody waits for it) has found it working.
    """

    def __init__(self, config: StorageConfig, space: KeySpace, piece_bytes: Sequence[int]) -> None:
        """`piece_bytes`: a page lies in the pool in so many pieces.

        Raises:
            ConfigError: there is room for fewer than three pages.
            NotEnoughMemoryError: there is no memory for them.
        """
        self.piece_bytes, self._space = tuple(piece_bytes), space
        self._timeout_seconds = config.task_timeout_seconds
        num_fitting = config.staging_bytes // space.object_bytes
        if num_fitting < 3:
            raise ConfigError(
                f"staging_bytes is {config.staging_bytes}, and a page takes {space.object_bytes}; "
                f"use at least {3 * space.object_bytes}"
            )
        num_each = min((num_fitting - 1) // 2, _MAX_STAGED_PAGES)
        num_pages = 2 * num_each + 1
        self._segment = SharedArray.create("hicache-staging", num_pages * space.object_bytes)
        self._memory = self._segment.view(np.uint8, (num_pages, space.object_bytes))
        self._base: int = self._memory.__array_interface__["data"][0]
        self._reading, self._writing = _Desk(0, num_each), _Desk(num_each, num_each)
        self._client = StorageProcesses(config, TransferConfig(), spaces=[space], segments=[self._segment])
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
        for desk in (self._reading, self._writing):  # for good: who copies now goes on until it is done
            if not desk.lock.acquire(timeout=self._timeout_seconds):
                return
        del self._memory
        self._segment.close()

    def count_leading(self, hashes: Sequence[bytes]) -> int:
        """How many of these pages, counted from the first, are there."""
        deadline, num_there = self._deadline(), 0
        for start in range(0, len(hashes), _HASHES_PER_LOOKUP):
            part = hashes[start : start + _HASHES_PER_LOOKUP]
            result = self._ask(TaskKind.LOOKUP, part, deadline)
            num_there += result.num_blocks if result is not None else 0
            if num_there < start + len(part):
                break
        return num_there

    def read(self, hashes: Sequence[bytes], addresses: Sequence[int]) -> int:
        """Fill pages; how many, counted from the first, hold exactly what was written under their hashes. The others
        are as they were. `addresses`: of the pieces, page by page."""
        return self._move(TaskKind.PREFETCH, hashes, addresses, self._reading)

    def write(self, hashes: Sequence[bytes], addresses: Sequence[int]) -> int:
        """Store pages that are not there yet; how many, counted from the first, are there now."""
        return self._move(TaskKind.WRITE, hashes, addresses, self._writing)

    def clear(self) -> bool:
        """Forget everything of these weights; whether that has been done."""
        return self._ask(TaskKind.CLEAR, (), self._deadline()) is not None

    def _deadline(self) -> float:
        return time.monotonic() + self._timeout_seconds

    def _move(self, kind: TaskKind, hashes: Sequence[bytes], addresses: Sequence[int], desk: _Desk) -> int:
        deadline, num_done, num_pieces = self._deadline(), 0, len(self.piece_bytes)
        if not self._can(kind) or not desk.lock.acquire(timeout=self._timeout_seconds):
            return 0
        is_mine = True
        try:
            while is_mine and num_done < len(hashes) and time.monotonic() < deadline and self._can(kind):
                part = hashes[num_done : num_done + len(desk.ids)]
                ids = desk.ids[: len(part)]
                places = addresses[num_done * num_pieces : (num_done + len(part)) * num_pieces]
                if kind is TaskKind.WRITE:
                    self._copy(ids, places, is_read=False)
                flight = self._submit(kind, part, ids)
                is_mine = self._wait(flight, deadline, desk)
                num_moved = self._num_moved(flight) if is_mine else 0
                if kind is TaskKind.PREFETCH:
                    self._copy(ids[:num_moved], places, is_read=True)
                num_done += num_moved
                if num_moved < len(part):
                    break
        finally:
            if is_mine:
                desk.lock.release()
        return num_done

    def _copy(self, ids: Int32Array, addresses: Sequence[int], *, is_read: bool) -> None:
        """One copy of each piece, without the interpreter's lock, between the pool and staging pages."""
        pieces = iter(addresses)
        for page in ids.tolist():
            staged = self._base + page * self._space.object_bytes
            for num_bytes, address in zip(self.piece_bytes, pieces, strict=False):  # sizes first: it ends the page
                target, source = (address, staged) if is_read else (staged, address)
                ctypes.memmove(target, source, num_bytes)
                staged += num_bytes

    def _ask(self, kind: TaskKind, hashes: Sequence[bytes], deadline: float) -> TransferResult | None:
        """The result of a task that moves no pages here; None where there is none, or an error."""
        if not self._can(kind):
            return None
        flight = self._submit(kind, hashes)
        flight.ended.wait(max(0.0, deadline - time.monotonic()))
        result = flight.result
        return result if result is not None and result.error is None else None

    @staticmethod
    def _num_moved(flight: _Flight) -> int:
        return flight.result.num_blocks if flight.result is not None and flight.result.error is None else 0

    def _wait(self, flight: _Flight, deadline: float, desk: _Desk) -> bool:
        """Wait for the end; whether the desk is still the caller's. If not, the task may yet touch its pages."""
        flight.ended.wait(max(0.0, deadline - time.monotonic()))
        with self._lock:
            if flight.result is None:
                flight.left_with = desk
            return flight.result is not None

    def _submit(self, kind: TaskKind, hashes: Sequence[bytes], ids: Int32Array = _NO_IDS) -> _Flight:
        flight = _Flight()
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
            deadline=self._deadline(),
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
            if breaker.is_probe_due(time.monotonic()) and self._probe_id is None:
                probe = self._new_task(TaskKind.PROBE, np.random.default_rng().bytes(_HASH_BYTES), self._probe_ids)
                self._probe_id = probe.task_id
                for each in (self._read_breaker, self._write_breaker):
                    if not each.is_closed:
                        each.begin_probe()
            is_closed = breaker.is_closed
        if probe is not None:
            self._client.submit(probe)
        return is_closed

    @property
    def _probe_ids(self) -> Int32Array:
        return self._writing.ids[-1:] + np.int32(1)  # the page behind both desks

    def _on_result(self, result: TransferResult) -> None:
        """The end of a task, on the client's thread or, of one that was refused, on the caller's."""
        with self._lock:
            states = [each.is_closed for each in (self._read_breaker, self._write_breaker)]
            self._judge(result)
            flight = self._flights.pop(result.task.task_id, None)
            if flight is not None:
                flight.result = result
                flight.ended.set()
            changed = states != [each.is_closed for each in (self._read_breaker, self._write_breaker)]
            reading, writing = self._read_breaker.state.name, self._write_breaker.state.name
        if flight is not None and flight.left_with is not None:
            flight.left_with.lock.release()
        if changed:
            logger.warning("event=hicache_breaker reading=%s writing=%s error=%r", reading, writing, result.error)

    def _judge(self, result: TransferResult) -> None:
        now, worked = time.monotonic(), result.error is None
        if result.task.task_id == self._probe_id:
            self._probe_id = None
            was_tried = worked or result.is_failure
            self._read_breaker.probe_ended(worked if was_tried else None, now)
            self._write_breaker.probe_ended(worked and result.num_blocks > 0 if was_tried else None, now)
        elif worked:
            self._breaker(result.task.kind).succeeded()
        elif result.is_failure:
            self._breaker(result.task.kind).failed(now)
