"""What goes to storage and what comes back. All but `submit` runs under the manager's lock."""

from __future__ import annotations

import threading
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from fastdeploy_cache.block_hash import HASH_BYTES
from fastdeploy_cache.block_pool import TASK
from fastdeploy_cache.outbox import Outbox
from fastdeploy_cache.policies.breaker import Breaker
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.prefetched import insert_copies
from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import CPU, Run
from fastdeploy_cache.stats import StorageTierStats
from fastdeploy_cache.storage_prefetch import StorageLimits, StoragePrefetch
from transfer_manager.storage.client import StorageClient
from transfer_manager.task import Direction, TransferResult, TransferTask

_MIN_SWEEP = 256  # queued runs
_MAX_REMEMBERED = 4096  # prefetches of requests that were never matched
_PROBE_SECONDS = 30.0  # between probes of a store that is slower than computing
_NO_IDS = np.empty(0, np.int32)


@dataclass(eq=False)
class _Fetch:
    """One piece of a prefetch: its destinations are the task's."""

    prefetch: StoragePrefetch
    first: int
    ids: array[int]


@dataclass(eq=False)
class _Write:
    """Blocks [start, start + len(ids)) of a run, as it was then, on their way to storage."""

    run: Run
    start: int
    ids: array[int]
    last_hash: bytes


class StorageTier:
    """Asks storage for what no tier here has, and writes to it what is queued, both in pieces.

    A write pins nothing: the CPU blocks that it reads may leave their run meanwhile, and are given out again when it
    has ended. A slow store so takes no room from anybody.
    """

    def __init__(
        self,
        tree: PrefixTree,
        client: StorageClient,
        limits: StorageLimits,
        speeds: LoadOrCompute,
        breakers: tuple[Breaker, Breaker],
    ) -> None:
        """`breakers`: of reading and of writing."""
        self._tree, self._pool, self._limits, self._speeds = tree, tree.pools[CPU], limits, speeds
        self.client = client
        self.reading, self.writing = breakers
        self.outbox = Outbox(client)
        self._next_task_id = 1
        self._fetches: dict[int, _Fetch] = {}
        self._lookups: dict[int, StoragePrefetch] = {}
        self._writes: dict[int, _Write] = {}
        self._probes: dict[int, array[int]] = {}
        self._probed_at = 0.0
        self._queue: OrderedDict[Run, None] = OrderedDict()
        self._num_fetching = self._num_writing = 0  # blocks
        self._by_request: OrderedDict[str, StoragePrefetch] = OrderedDict()
        self._drained = threading.Event()  # nothing is queued or being written
        self._drained.set()
        self._sweep_above = _MIN_SWEEP
        self.num_fetched_blocks = self.num_written_blocks = self.num_skipped_blocks = 0

    @property
    def held_ids(self) -> list[int]:
        """CPU blocks that tasks of storage own."""
        return [i for fetch in self._fetches.values() for i in fetch.ids] + [
            i for ids in self._probes.values() for i in ids
        ]

    def stats(self) -> StorageTierStats:
        """How it goes."""
        return StorageTierStats(
            is_available=self.client.available,
            reading=self.reading.state,
            writing=self.writing.state,
            num_fetched_blocks=self.num_fetched_blocks,
            num_written_blocks=self.num_written_blocks,
            num_skipped_blocks=self.num_skipped_blocks,
        )

    # -- prefetch

    def wants(self, num_missing_blocks: int, now: float) -> bool:
        """Whether to ask for so many blocks at all."""
        if not self._is_usable(self.reading, Direction.LOOKUP, now) or num_missing_blocks < self._limits.min_blocks:
            return False
        if self._speeds.is_worth_fetching(num_missing_blocks):
            return True
        if now - self._probed_at > _PROBE_SECONDS and not self._probes:  # it may have become faster
            self.probe()
        return False

    def start(self, request_id: str, prefetch: StoragePrefetch) -> None:
        """Ask how much of it is there; `finish` goes on from the answer."""
        self.forget(request_id)
        self._by_request[request_id] = prefetch
        while len(self._by_request) > _MAX_REMEMBERED:
            self._revoke(self._by_request.popitem(last=False)[1])
        task = self._new_task(Direction.LOOKUP, prefetch.hashes, token_ids=self._tokens(prefetch, prefetch.num_wanted))
        self._lookups[task.task_id] = prefetch
        self._send(prefetch, task)

    def take(self, request_id: str) -> StoragePrefetch | None:
        """The request's prefetch, which is the caller's to end from now on."""
        return self._by_request.pop(request_id, None)

    def forget(self, request_id: str) -> None:
        """The request has ended, or starts anew: what has not come is not wanted."""
        prefetch = self._by_request.pop(request_id, None)
        if prefetch is not None:
            self._revoke(prefetch)

    def revoke(self, prefetch: StoragePrefetch) -> None:
        """Nobody wants what has not come yet."""
        self._revoke(prefetch)

    def _revoke(self, prefetch: StoragePrefetch) -> None:
        if not prefetch.revoked:
            prefetch.revoked, prefetch.on_landed = True, None
            for task_id in prefetch.task_ids:
                self.client.cancel(task_id)

    def _fetch(self, prefetch: StoragePrefetch, num_present: int) -> None:
        """Storage has so many: take room for them and start reading."""
        limits, residency = self._limits, self._tree.residency
        num_room = min(limits.max_blocks - self._num_fetching, residency.num_available(CPU))
        num_blocks = min(num_present, num_room)
        if num_blocks < limits.min_blocks or not self._speeds.is_worth_fetching(num_blocks):
            return
        residency.evict(CPU, max(0, num_blocks - self._pool.num_free))
        for start in range(0, num_blocks, limits.chunk_blocks):
            ids = self._pool.allocate(min(limits.chunk_blocks, num_blocks - start), TASK)
            self._num_fetching += len(ids)
            task = self._new_task(
                Direction.PREFETCH,
                prefetch.hashes[start * HASH_BYTES : (start + len(ids)) * HASH_BYTES],
                destinations=ids,
                token_ids=self._tokens(prefetch, start + len(ids)),
            )
            self._fetches[task.task_id] = _Fetch(prefetch, prefetch.first + start, ids)
            self._send(prefetch, task)

    def _send(self, prefetch: StoragePrefetch, task: TransferTask) -> None:
        prefetch.task_ids.add(task.task_id)
        prefetch.num_in_flight += 1
        self.outbox.put(task)

    def _tokens(self, prefetch: StoragePrefetch, num_blocks: int) -> bytes:
        if not self.client.needs_token_ids:
            return b""
        return bytes(prefetch.keys.tokens[: (prefetch.first + num_blocks) * self._tree.block_bytes])

    # -- write

    def queue(self, run: Run) -> None:
        """Blocks of this run may have to be written."""
        if run.num_stored < run.cpu_end:
            self._queue[run] = None
            self._drained.clear()
            if len(self._queue) > self._sweep_above:
                self._sweep()

    def _sweep(self) -> None:
        """Forget what has left the CPU tier unwritten: while a store is away the queue is no longer than the tier."""
        for run in [run for run in self._queue if not self._is_there(run)]:
            del self._queue[run]
        self._sweep_above = max(_MIN_SWEEP, 2 * len(self._queue))

    def _is_there(self, run: Run) -> bool:
        """Whether what comes next to be written of a run has a copy."""
        alive = run.parent is not None and run.epoch == self._tree.epoch
        return alive and run.cpu_start <= run.num_stored < run.cpu_end

    def wait_drained(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or being written; False when the time is over first. Not under the lock."""
        return self._drained.wait(max(0.0, timeout_seconds))

    def pump(self) -> None:
        """Start writing what is queued, as far as there is room in flight."""
        self._start_writes()
        if not self._queue and not self._writes:
            self._drained.set()

    def _start_writes(self) -> None:
        while self._queue and self._is_usable(self.writing, Direction.WRITE, time.monotonic()):
            num_room = self._limits.max_writing_blocks - self._num_writing
            if num_room <= 0:
                return
            run = next(iter(self._queue))
            if not self._is_there(run):
                del self._queue[run]
                continue
            start, end = run.num_stored, run.cpu_end
            num_blocks = min(end - start, num_room, self._limits.chunk_blocks)
            self._write(run, start, num_blocks)
            if start + num_blocks == end:
                del self._queue[run]
        if self._queue and not self.writing.is_closed:  # best effort: a store that fails is not owed a backlog
            self.num_skipped_blocks += sum(max(0, run.cpu_end - run.num_stored) for run in self._queue)
            self._queue.clear()

    def _write(self, run: Run, start: int, num_blocks: int) -> None:
        ids = run.ids[CPU][start - run.cpu_start : start - run.cpu_start + num_blocks]
        hashes = bytes(run.hashes[start * HASH_BYTES : (start + num_blocks) * HASH_BYTES])
        tokens = b""
        if self.client.needs_token_ids:
            *above, _ = run.path()
            tokens = b"".join([bytes(upper.tokens) for upper in above])
            tokens += bytes(run.tokens[: (start + num_blocks) * self._tree.block_bytes])
        task = self._new_task(Direction.WRITE, hashes, sources=ids, token_ids=tokens, priority=run.usage.priority)
        self._pool.begin_reading(ids)
        run.num_stored = start + num_blocks
        self._num_writing += num_blocks
        self._writes[task.task_id] = _Write(run, start, ids, hashes[-HASH_BYTES:])
        self.outbox.put(task)

    # -- probing

    def resume(self) -> None:
        """The store has been opened, perhaps again: go on with what was queued for it."""
        if not self._probed_at:
            self.probe()
        self.pump()

    def probe(self) -> None:
        """Find out whether the store works and how fast it is, with one block lent to it."""
        if not self._tree.residency.num_available(CPU) or not self.client.available:
            return
        self._probed_at = time.monotonic()
        self._tree.residency.evict(CPU, max(0, 1 - self._pool.num_free))
        ids = self._pool.allocate(1, TASK)
        for breaker in (self.reading, self.writing):
            if not breaker.is_closed:
                breaker.begin_probe()
        task = self._new_task(Direction.PROBE, np.random.default_rng().bytes(HASH_BYTES), destinations=ids)
        self._probes[task.task_id] = ids
        self.outbox.put(task)

    def _is_usable(self, breaker: Breaker, direction: Direction, now: float) -> bool:
        if breaker.is_probe_due(now) and not self._probes:
            self.probe()
        return breaker.is_closed and self.client.has_room(direction)

    # -- ending

    def finish(self, result: TransferResult) -> list[Callable[[], None]]:
        """All ranks have answered or are reaped. Returns what to call without the lock."""
        task, direction = result.task, result.task.direction
        if direction is Direction.WRITE:
            self._end_write(self._writes.pop(task.task_id), result)
            self.pump()
            return []
        if direction is Direction.PROBE:
            self._end_probe(self._probes.pop(task.task_id), result)
            self.pump()
            return []
        if direction is Direction.LOOKUP:
            prefetch = self._lookups.pop(task.task_id)
            if not prefetch.revoked:
                self._judge(self.reading, result)
                if result.error is None and prefetch.epoch == self._tree.epoch:
                    self._fetch(prefetch, min(result.num_blocks, prefetch.num_wanted))
        else:
            fetch = self._fetches.pop(task.task_id)
            prefetch = fetch.prefetch
            self._end_fetch(fetch, result)
        prefetch.num_in_flight -= 1
        prefetch.task_ids.discard(task.task_id)
        if prefetch.num_in_flight:
            return []
        prefetch.done.set()
        calls, prefetch.on_done = prefetch.on_done, []
        return calls

    def _end_fetch(self, fetch: _Fetch, result: TransferResult) -> None:
        prefetch, ids = fetch.prefetch, fetch.ids
        self._num_fetching -= len(ids)
        num_good = min(result.num_blocks, len(ids)) if result.error is None else 0
        if result.error is None or not prefetch.revoked:  # one that was cancelled says nothing of the store
            self._judge(self.reading, result)
            if result.error is None and num_good:
                self._speeds.storage.note(num_good * self._block_bytes(result), max(r.seconds for r in result.ranks))
        continues = prefetch.first + prefetch.num_landed == fetch.first and prefetch.epoch == self._tree.epoch
        num_joined = 0
        if num_good and continues:
            came = ids[:num_good]
            num_joined = insert_copies(self._tree, prefetch.namespace, prefetch.keys, fetch.first, came)
            prefetch.num_landed += num_good
            self.num_fetched_blocks += num_joined
            ids = ids[: num_good - num_joined] + ids[num_good:]
        if num_good < len(fetch.ids):
            self._revoke_rest(prefetch)
        if ids:
            self._pool.free(ids, TASK)
        if num_joined and prefetch.on_landed is not None:
            prefetch.on_landed()

    def _revoke_rest(self, prefetch: StoragePrefetch) -> None:
        """A piece did not come whole: what is behind it cannot be used."""
        for task_id in prefetch.task_ids:
            self.client.cancel(task_id)

    @staticmethod
    def _block_bytes(result: TransferResult) -> float:
        return max(r.num_bytes / max(1, r.num_blocks) for r in result.ranks)

    def _end_write(self, write: _Write, result: TransferResult) -> None:
        self._pool.end_reading(write.ids)
        self._num_writing -= len(write.ids)
        self._judge(self.writing, result)
        num_stored = result.num_blocks if result.error is None else 0
        self.num_written_blocks += num_stored
        num_missed = len(write.ids) - num_stored
        if num_missed:
            self.num_skipped_blocks += num_missed
            run, end = write.run, write.start + len(write.ids)
            # a run that was cut meanwhile keeps its mark: at worst some blocks are not offered again
            if (
                run.num_blocks >= end
                and bytes(run.hashes[(end - 1) * HASH_BYTES : end * HASH_BYTES]) == write.last_hash
            ):
                run.num_stored = min(run.num_stored, write.start + num_stored)

    def _end_probe(self, ids: array[int], result: TransferResult) -> None:
        self._pool.free(ids, TASK)
        for breaker in (self.reading, self.writing):
            self._judge(breaker, result)
        speeds = [r.num_bytes for r in result.ranks]
        if result.error is None and speeds and min(speeds):
            self._speeds.storage.note(min(speeds), 1.0)

    def _judge(self, breaker: Breaker, result: TransferResult) -> None:
        if result.error is None:
            breaker.succeeded()
        else:
            breaker.failed(time.monotonic())

    def _new_task(
        self,
        direction: Direction,
        hashes: bytes,
        *,
        sources: array[int] | None = None,
        destinations: array[int] | None = None,
        token_ids: bytes = b"",
        priority: float | None = None,
    ) -> TransferTask:
        task_id, self._next_task_id = self._next_task_id, self._next_task_id + 1
        return TransferTask(
            task_id=task_id,
            direction=direction,
            source_ids=np.frombuffer(sources, np.int32) if sources is not None else _NO_IDS,
            destination_ids=np.frombuffer(destinations, np.int32) if destinations is not None else _NO_IDS,
            deadline=time.monotonic() + self._limits.task_timeout_seconds,
            hashes=hashes,
            token_ids=token_ids,
            priority=priority,
        )
