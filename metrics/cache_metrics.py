"""Every series of the cache: what is recorded as it happens, and what is asked for at a scrape.

The cache adds to plain numbers, once for each request or task; Prometheus objects are made at scrape time only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from threading import Lock
from typing import TYPE_CHECKING

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.metrics.families import Families
from fastdeploy_cache.metrics.peer_counts import PeerCounts
from fastdeploy_cache.metrics.picture import Picture, picture_families
from fastdeploy_cache.metrics.request_counts import NamespaceCounts, RequestCounts
from fastdeploy_cache.metrics.task_counts import TASK_KINDS, TaskCounts, TaskSums

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class CacheMetrics:
    """Counts what the cache did; a collector for `prometheus_client`. Any thread may call any method.

    All series exist, at zero, from the first scrape on, but for those of single peers.
    """

    def __init__(
        self,
        *,
        tp_size: int = 1,
        data_parallel_id: int = 0,
        window_seconds: float = 300.0,
        max_namespaces: int = 0,
        clock: Callable[[], float] = SYSTEM_CLOCK.now,
    ) -> None:
        self._num_ranks, self._dp, self._clock = tp_size, data_parallel_id, clock
        self._families = Families(data_parallel_id)
        self._lock = Lock()
        self._requests, self._tasks, self._peers = RequestCounts(window_seconds), TaskCounts(tp_size), PeerCounts()
        self._namespaces = NamespaceCounts(max_namespaces)
        self._look: Callable[[], Picture] = Picture

    @property
    def data_parallel_id(self) -> int:
        """What its series are labelled with."""
        return self._dp

    def observe(self, look: Callable[[], Picture]) -> None:
        """Ask for this picture of the cache at every scrape."""
        self._look = look

    def observe_peers(self, layers_in_flight: Callable[[], Mapping[str, int]]) -> None:
        """Read this at every scrape: by peer, layers that it has computed and that have not come yet."""
        self._peers.observe(layers_in_flight)

    def record_request(self, num_tokens: int, hit_tokens: tuple[int, ...]) -> None:
        """A request of `num_tokens` prompt tokens was admitted; `hit_tokens` in the order of `TIERS`."""
        now = self._clock()  # first: it may be somebody's who raises
        with self._lock:
            self._requests.record(now, num_tokens, hit_tokens)

    def record_namespace(self, label: str, num_tokens: int, hit_tokens: tuple[int, ...]) -> None:
        """The same of a request's namespace, by what it is called in labels."""
        with self._lock:
            self._namespaces.record(label, num_tokens, hit_tokens)

    def record_task(self, kind: str, rank: int, num_bytes: int, seconds: float, failed: bool) -> None:
        """One rank's part of a task has ended."""
        with self._lock:
            self._tasks.record(kind, rank, num_bytes, seconds, failed)

    def record_task_duration(self, kind: str, seconds: float) -> None:
        """Every rank has answered a task, so long after it was decided on."""
        with self._lock:
            self._tasks.record_duration(kind, seconds)

    def record_prefetch(self, seconds: float) -> None:
        """A request's prefetch from storage has ended, so long after it began."""
        with self._lock:
            self._tasks.record_prefetch(seconds)

    def record_peer(self, kind: str, peer: str, num_bytes: int, seconds: float, reason: str | None) -> None:
        """A send to another instance, or a receive from it, has ended; with a reason it came to nothing."""
        with self._lock:
            self._peers.record(kind, peer, num_bytes, seconds, reason)

    def record_skipped_writes(self, num_blocks: int) -> None:
        """Blocks that were to be copied down and were not: no room, or a rank was down."""
        with self._lock:
            self._tasks.record_skipped(num_blocks)

    def hit_rates(self) -> dict[str, float]:
        """The hit rates over the window: `request`, `token`, and the token hit rate of each tier."""
        with self._lock:
            return self._requests.hit_rates(self._clock())

    def known_hit_rates(self) -> Mapping[str, float | None]:
        """The same, and None for each where no request came within the window."""
        with self._lock:
            return self._requests.known_hit_rates(self._clock())

    @property
    def num_requests(self) -> int:
        """Admitted so far."""
        return self._requests.num_requests

    def token_counts(self) -> tuple[int, tuple[int, ...]]:
        """Prompt tokens of admitted requests so far, and how many of them each tier has served."""
        with self._lock:
            return self._requests.num_tokens, self._requests.hit_tokens

    def task_bytes(self) -> dict[str, int]:
        """Bytes copied so far by all ranks together, by kind."""
        return {kind: self.task_totals(kind).num_bytes for kind in TASK_KINDS}

    def task_totals(self, kind: str) -> TaskSums:
        """Tasks of one of `TASK_KINDS` so far, of all ranks together."""
        with self._lock:
            return self._tasks.totals(kind)

    def collect(self) -> Iterator[Metric]:
        """The protocol of a `prometheus_client` collector."""
        families, now = self._families, self._clock()
        with self._lock:
            # not yielded from here: the consumer would hold the lock for as long as it likes
            found = self._requests.families(families, now) + self._tasks.families(families)
            found += self._peers.families(families) + self._namespaces.families(families)
        yield from found
        yield self._peers.layers_family(families)
        yield from picture_families(self._look(), families, self._num_ranks)
