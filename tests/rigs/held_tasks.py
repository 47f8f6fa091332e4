"""Tasks of a cache that are done when the test says so."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask


class Held:
    """Stands between the cache and its client: holds loads back, or others, until the test lets them go or fail."""

    def __init__(self, cache: PrefixCacheManager, kinds: Sequence[TaskKind] = (TaskKind.SWAP_IN,)) -> None:
        self._kinds = kinds
        self._client: Any = cache._movement.client
        self._submit, self.cache = self._client.submit, cache
        self.tasks: list[TransferTask] = []
        self.num_loads = 0
        self._client.submit = self._hold

    def _hold(self, task: TransferTask) -> None:
        if task.kind in self._kinds:
            self.num_loads += task.kind is TaskKind.SWAP_IN
            self.tasks.append(task)
        else:
            self._submit(task)

    def end(self) -> None:
        """Hold nothing back from now on."""
        self._client.submit = self._submit

    def go(self, fails: Callable[[TransferTask], bool] = lambda _: False) -> None:
        """Each is done, or fails."""
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            if fails(task):
                failed = RankResult(rank=0, error="the test says so")
                self.cache._movement.mover.on_result(TransferResult(task=task, ranks=(failed,)))
            else:
                self._submit(task)
