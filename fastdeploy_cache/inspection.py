"""What a manager shows of itself: counts, metrics, its books."""

from __future__ import annotations

import threading
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.invariants import check
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, Tier, Transfer
from fastdeploy_cache.callers.pinned_prefix import Pinned
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.exporter import Collector, MetricsExporter
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.peers.link_road import PeerTier
from fastdeploy_cache.peers.store_road import StoredPeers
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.stats import CacheStats, TierStats
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient


class Inspection:
    """The part of `PrefixCacheManager` that changes nothing; any thread."""

    metrics: CacheMetrics
    _ahead: dict[Transfer, int]
    _client: TransferClient
    _detached: list[StorageTier]
    _exporters: list[MetricsExporter]
    _lock: threading.Lock
    _mover: BlockMover
    _peers: PeerTier | StoredPeers | None
    _pinned: Pinned
    _pools: tuple[BlockPool, BlockPool]
    _requests: dict[str, ActiveRequest]
    _storage: StorageTier | None
    _tree: PrefixTree

    def stats(self) -> CacheStats:
        """Blocks by owner, transfers, hit rates over the window, ranks."""
        with self._lock:
            peers = self._peers
            gpu, cpu = (TierStats.of(self._pools[tier], self._tree.residency, tier) for tier in Tier)
            return CacheStats(
                gpu=gpu,
                cpu=cpu,
                storage=self._storage.stats() if self._storage is not None else None,
                num_requests=len(self._requests),
                num_transfers_in_flight=sum(not t.done.is_set() for t in self._mover.in_flight.values()),
                num_open_sends=len(peers.sends) if peers is not None else 0,
                num_open_receives=len(peers.receives) if peers is not None else 0,
                num_swapped_in_blocks=self._mover.num_landed[GPU],
                num_swapped_out_blocks=self._mover.num_landed[CPU],
                num_refused_transfers={d.value: n for d, n in self._mover.num_refused.items()},
                num_failed_steps=dict(self._tree.mishaps.counts),
                num_quarantined_blocks=self._mover.num_quarantined_blocks,
                epoch=self._tree.epoch,
                hit_rates=self.metrics.hit_rates(),
                ranks=tuple(self._client.statuses()),
            )

    def check_invariants(self) -> None:
        """Raise `AssertionError` if the books do not add up. Walks the whole tree: for tests and for doubt."""
        with self._lock:
            tiers = [*self._detached, *([self._storage] if self._storage is not None else [])]
            held = [block_id for tier in tiers for block_id in tier.held_ids]
            requests, transfers = list(self._requests.values()), list(self._mover.in_flight.values())
            peers = self._peers
            sends, receives = (peers.sends, peers.receives) if peers is not None else (None, None)
            check(
                self._tree,
                requests,
                transfers,
                storage_ids=held,
                pins=[*self._pinned, *(pin for each in (sends, receives) if each is not None for pin in each.pins)],
                ahead=self._ahead,
                peer_ids=[i for each in (sends, receives) if each is not None for i in each.held_ids],
                waiting=receives.loads if receives is not None else (),
            )

    def serve_metrics(self, host: str = "127.0.0.1", port: int = 0, *, also: Sequence[Collector] = ()) -> str:
        """Start the Prometheus endpoint of this cache; returns its URL. Port 0 takes a free one.

        `also`: further collectors, such as `metrics` of the other caches of a data-parallel group.

        Raises:
            ConfigError: two caches of one data-parallel id.
            PortInUseError: the address cannot be listened on.
        """
        ids = [c.data_parallel_id for c in (self.metrics, *also) if isinstance(c, CacheMetrics)]
        if len(set(ids)) < len(ids):
            raise ConfigError(f"metrics of caches with data-parallel ids {ids}; give each its own data_parallel_id")
        exporter = MetricsExporter(self.metrics, *also, host=host, port=port)
        self._exporters.append(exporter)
        return exporter.url

    def _show_metrics(self) -> None:
        self.metrics.observe(
            lambda: self.stats().block_counts(),
            lambda: self.stats().eviction_counts(),
            lambda: self.stats().rank_counts(),
            lambda: self.stats().refused_counts(),
            lambda: self.stats().storage_counts(),
            failures=lambda: self.stats().failure_counts(),
        )
