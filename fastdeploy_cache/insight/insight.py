"""What can be seen of a cache from outside of its requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import CPU, GPU, Tier
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.explanation import Explanation
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.peers import Peers
from fastdeploy_cache.requests.requests import Requests
from fastdeploy_cache.storage.access import StorageAccess

if TYPE_CHECKING:
    from fastdeploy_cache.insight.doctor import Finding
    from fastdeploy_cache.stats import CacheStats


class Insight:
    """Looks at every room and changes nothing. Any thread."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        *,
        requests: Requests,
        storage: StorageAccess,
        peers: Peers,
        metrics: CacheMetrics,
    ) -> None:
        self._config, self._books, self._movement = config, books, movement
        self._requests, self._storage, self._peers, self._metrics = requests, storage, peers, metrics

    def explain(self, request_id: str) -> Explanation:
        """See `PrefixCacheManager.explain`."""
        with self._books:
            return self._requests.explain(request_id)

    def explain_last(self, num_requests: int) -> list[Explanation]:
        """See `PrefixCacheManager.explain_last`."""
        with self._books:
            accounts = self._requests.accounts.last(num_requests)
        return self._requests.accounts.explained(accounts)

    def examine(self) -> list[Finding]:
        """See `PrefixCacheManager.examine`."""
        from fastdeploy_cache.insight.doctor import examine  # late: it is seldom asked

        requests = self.explain_last(self._config.num_explained_requests)
        return examine(self._config, self.stats(), requests, self._books)

    def stats(self) -> CacheStats:
        """See `PrefixCacheManager.stats`."""
        from fastdeploy_cache.stats import CacheStats, TierStats  # late: an import of the manager is quick

        with self._books:
            books, mover, road = self._books, self._movement.mover, self._peers.road
            gpu, cpu = (TierStats.of(books.pools[tier], books.residency, tier) for tier in Tier)
            return CacheStats(
                gpu=gpu,
                cpu=cpu,
                storage=self._storage.stats(),
                num_requests=len(self._requests),
                num_transfers_in_flight=sum(not t.done.is_set() for t in mover.in_flight.values()),
                num_open_sends=len(road.sends),
                num_open_receives=len(road.receives),
                num_swapped_in_blocks=mover.num_landed[GPU],
                num_swapped_out_blocks=mover.num_landed[CPU],
                num_refused_transfers={d.value: n for d, n in mover.num_refused.items()},
                num_failed_steps=dict(books.mishaps.counts),
                num_hashed_blocks=books.tree.names.num_hashed,
                hash_seconds=books.tree.names.seconds,
                num_quarantined_blocks=mover.num_quarantined_blocks,
                epoch=books.tree.epoch,
                hit_rates=self._metrics.hit_rates(),
                missed_tokens=self._requests.accounts.missed_by_cause(),
                saved_seconds=self._requests.accounts.saved_by_tier(),
                ranks=tuple(self._movement.client.statuses()),
            )
