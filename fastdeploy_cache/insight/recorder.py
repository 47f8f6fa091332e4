"""What the cache does, told to its metrics, and the endpoints that show them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import NotCopied
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.shortage import share_of_files
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.picture import Picture
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.storage.prefetch import PrefetchEnded, StorageTaskEnded
from fastdeploy_cache.transfer_manager.task import TransferResult

if TYPE_CHECKING:
    from fastdeploy_cache.metrics.exporter import Collector, MetricsExporter, Page

_SHARE_OF_FILES, _MOST_CONNECTIONS = 1 / 8, 64  # of the metrics' port


class Recorder:
    """The metrics are told after the turn in which something has happened, as they have a lock of their own."""

    def __init__(self, config: CacheConfig, clock: Callable[[], float]) -> None:
        self.metrics = CacheMetrics(
            max_namespaces=config.insight.num_namespaces,
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
        books.listen(PrefetchEnded, self._on_prefetch_ended)
        books.listen(NotCopied, lambda skipped: self._note_skipped(skipped.num_blocks))

    def show(self, look: Callable[[], Picture]) -> None:
        """Ask for this picture at each scrape."""
        self.metrics.observe(look)

    def serve(
        self, host: str, port: int, also: Sequence[Collector], pages: Mapping[str, Page], allow_hosts: Sequence[str]
    ) -> str:
        """See `PrefixCacheManager.serve_metrics`."""
        from fastdeploy_cache.metrics.exporter import MetricsExporter  # late: a web server comes with it

        ids = [c.data_parallel_id for c in (self.metrics, *also) if isinstance(c, CacheMetrics)]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"metrics of caches with data-parallel ids {ids}; give each its own data_parallel_id")
        most = share_of_files(_SHARE_OF_FILES, _MOST_CONNECTIONS)
        exporter = MetricsExporter(
            self.metrics, *also, host=host, port=port, pages=pages, allow_hosts=allow_hosts, max_connections=most
        )
        self._exporters.append(exporter)
        return exporter.url

    def close(self) -> None:
        """End the endpoints."""
        while self._exporters:
            self._exporters.pop().close()

    def _note_skipped(self, num_blocks: int) -> None:
        """So many blocks should have been copied down and could not be. In a turn."""
        if num_blocks:
            record = functools.partial(self.metrics.record_skipped_writes, num_blocks)
            self._books.call_later(functools.partial(self._books.mishaps.contain, "metrics", record))

    def _on_task_ended(self, ended: TaskEnded | StorageTaskEnded) -> None:
        self._books.call_later(functools.partial(self._record_task, ended.result, ended.seconds))
        if isinstance(ended, TaskEnded):
            self._note_skipped(ended.num_lost)

    def _on_prefetch_ended(self, ended: PrefetchEnded) -> None:
        record = functools.partial(self.metrics.record_prefetch, ended.seconds)
        self._books.call_later(functools.partial(self._books.mishaps.contain, "metrics", record))

    def _record_task(self, result: TransferResult, seconds: float) -> None:
        """What each rank has moved, and how long all of them took."""
        kind, contain, record = result.task.kind.value, self._books.mishaps.contain, self.metrics.record_task
        for r in result.ranks:
            contain("metrics", functools.partial(record, kind, r.rank, r.num_bytes, r.seconds, r.error is not None))
        contain("metrics", functools.partial(self.metrics.record_task_duration, kind, seconds))
