"""A picture of the cache at one moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fastdeploy_cache.block_pool import REQUEST, RUN, TASK, BlockPool
from fastdeploy_cache.residency import Residency
from fastdeploy_cache.run import Tier
from transfer_manager.client import RankStatus


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """Blocks of one tier. `num_cached` are in the tree, of which `num_protected` are pinned and cannot be evicted.

    `num_evicted` have gone since the start to make room.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_protected: int
    num_private: int
    num_in_flight: int
    num_evicted: int

    @classmethod
    def of(cls, pool: BlockPool, residency: Residency, tier: Tier) -> TierStats:
        """Read the books of a tier."""
        return cls(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.count(RUN),
            num_protected=residency.num_protected[tier],
            num_private=pool.count(REQUEST),
            num_in_flight=pool.count(TASK),
            num_evicted=sum(residency.num_evicted[tier]),
        )

    def by_state(self) -> dict[str, int]:
        """Every block in exactly one state."""
        return {
            "free": self.num_free,
            "evictable": self.num_cached - self.num_protected,
            "pinned": self.num_protected,
            "private": self.num_private,
            "in_flight": self.num_in_flight,
        }


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """See `PrefixCacheManager.stats`. `hit_rates` are of the sliding window: request, token, gpu, cpu, storage."""

    gpu: TierStats
    cpu: TierStats
    num_requests: int
    num_transfers_in_flight: int
    num_swapped_in_blocks: int
    num_swapped_out_blocks: int
    epoch: int
    hit_rates: Mapping[str, float]
    ranks: tuple[RankStatus, ...]
