"""What the cache does, told to its metrics, and the endpoints that show them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics, WorthCounts
from fastdeploy_cache.metrics.what_if_metrics import WhatIfCounts
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.storage.prefetch import StorageTaskEnded
from fastdeploy_cache.transfer_manager.task import TransferResult

if TYPE_CHECKING:
    from fastdeploy_cache.metrics.exporter import Collector, MetricsExporter
    from fastdeploy_cache.stats import CacheStats


class Recorder:
    """The metrics are told after the turn in which something has happened, as they have a lock of their own."""

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.metrics = CacheMetrics(
            tp_size=config.transfer.tp_size,
            data_parallel_id=config.transfer.data_parallel_id,
            window_seconds=config.hit_rate_window_seconds,
            clock=clock,
        )
        self._exporters: list[MetricsExporter] = []

    def follow(self, books: Books) -> None:
        """Record the tasks that end."""
        self._books = books
        books.listen(TaskEnded, self._on_task_ended)
        books.listen(StorageTaskEnded, self._on_task_ended)

    def show(
        self, stats: Callable[[], CacheStats], worths: Callable[[], WorthCounts], what_if: Callable[[], WhatIfCounts]
    ) -> None:
        """Ask these stats at each scrape, what was missed, saved and spent, and what other sizes would hit."""
        self.metrics.observe(
            lambda: stats().block_counts(),
            lambda: stats().eviction_counts(),
            lambda: stats().rank_counts(),
            lambda: stats().refused_counts(),
            lambda: stats().storage_counts(),
            failures=lambda: stats().failure_counts(),
            hashes=lambda: stats().hash_counts(),
            worths=worths,
            what_if=what_if,
        )

    def serve(self, host: str, port: int, also: Sequence[Collector]) -> str:
        """See `PrefixCacheManager.serve_metrics`."""
        from fastdeploy_cache.metrics.exporter import MetricsExporter  # late: a web server comes with it

        ids = [c.data_parallel_id for c in (self.metrics, *also) if isinstance(c, CacheMetrics)]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"metrics of caches with data-parallel ids {ids}; give each its own data_parallel_id")
        exporter = MetricsExporter(self.metrics, *also, host=host, port=port)
        self._exporters.append(exporter)
        return exporter.url

    def close(self) -> None:
        """End the endpoints."""
        while self._exporters:
            self._exporters.pop().close()

    def note_skipped(self, num_blocks: int) -> None:
        """So many blocks should have been copied down and could not be. In a turn."""
        if num_blocks:
            record = functools.partial(self.metrics.record_skipped_writes, num_blocks)
            self._books.call_later(functools.partial(self._books.mishaps.contain, "metrics", record))

    def _on_task_ended(self, ended: TaskEnded | StorageTaskEnded) -> None:
        self._books.call_later(functools.partial(self._record_task, ended.result))
        if isinstance(ended, TaskEnded):
            self.note_skipped(ended.num_lost)

    def _record_task(self, result: TransferResult) -> None:
        """What each rank has moved."""
        kind, contain, record = result.task.kind.value, self._books.mishaps.contain, self.metrics.record_task
        for r in result.ranks:
            contain("metrics", functools.partial(record, kind, r.rank, r.num_bytes, r.seconds, r.error is not None))
