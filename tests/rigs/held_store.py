"""A store in memory whose tasks are done when the test says so, by the code of a storage process, over real bytes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.storage.worker import StorageExecutor
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask
from tests.rigs.memory_storage import MemoryStorage


class HeldStore:
    """Of one rank. `objects` outlive the cache. Tasks of `holds` wait; all others are done at once."""

    needs_token_ids = False

    def __init__(self, cache: PrefixCacheManager, objects: dict[str, bytes], weights_id: str = "w") -> None:
        layout = cache.config.rank_layout()
        assert layout is not None
        self.cache = cache
        self.objects, self.space = objects, KeySpace.of(weights_id, layout, cache.config.block_size, 0, 1)
        num_cpu_blocks, size = cache.config.pool_sizes()[1], layout.block_bytes
        segment = cache._movement.client.cpu_segments()[0].view(np.uint8, (num_cpu_blocks, size))
        executor: Any = StorageExecutor.__new__(StorageExecutor)
        executor._segment, executor._base, executor._size = segment, 0, size
        executor._weights_id, executor._opened_ns, executor._one_writer = weights_id, 0, threading.Lock()
        executor._store = MemoryStorage({"objects": objects}, self.space, segment)
        self._executor, self.holds, self.tasks = executor, set[TaskKind](), deque[TransferTask]()
        self.log: list[TransferTask] = []  # all that were done

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        self._on_result = on_result
        on_ready()

    def submit(self, task: TransferTask) -> None:
        self.tasks.append(task)
        if task.kind not in self.holds:
            self.tasks.pop()
            self._do(task)

    def go(self, error: str | None = None) -> None:
        """Do what waits, and what is asked for because of that; or let the first one fail."""
        self.holds = set()
        while self.tasks:
            self._do(self.tasks.popleft(), error)
            error = None

    def step(self, error: str | None = None) -> TransferTask:
        """Do the oldest one alone."""
        task = self.tasks.popleft()
        self._do(task, error)
        return task

    def _do(self, task: TransferTask, error: str | None = None) -> None:
        self.log.append(task)
        num_bytes = num_blocks = 0
        if error is None:
            num_bytes, num_blocks = self._executor._do(task)[:2]
        result = RankResult(rank=0, num_bytes=num_bytes, num_blocks=num_blocks, seconds=0.001, error=error)
        self._on_result(TransferResult(task=task, ranks=(result,)))

    def cancel(self, task_id: int) -> None:
        pass

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        return True

    available = True

    def statuses(self) -> list[RankStatus]:
        return [RankStatus(rank=0, up=True, num_restarts=0)]

    def stop(self) -> None:
        while self.tasks:
            self.step("stopped")


@contextmanager
def stored_in(
    cache: PrefixCacheManager, objects: dict[str, bytes], weights_id: str = "w", *, may_fail: bool = False
) -> Iterator[HeldStore]:
    """A cache with such a store, until it is closed; its books add up then. `may_fail`: steps that verbs take along."""
    with cache:
        store = HeldStore(cache, objects, weights_id)
        cache.storage.attach(StorageConfig(folder="/nowhere", weights_id=weights_id, admission="all"), client=store)
        yield store
        cache.check_invariants()
        assert may_fail or not any(cache.stats().num_failed_steps.values())
