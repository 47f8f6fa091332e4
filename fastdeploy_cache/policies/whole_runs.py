"""Policies over runs that keep their borders, for adapters whose originals evict whole nodes."""

from __future__ import annotations

from fastdeploy_cache.books.leaves.policy import Clock, EvictionPolicy
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.policies.eviction import RANKING_POLICIES


def whole_runs(name: str, clock: Clock) -> EvictionPolicy:
    """The ranking policy of that name, under which a run ends where an insert has ended.

    Only `CallerBlocks.evict_runs` takes whole runs; what `allocate` evicts is still exact. A request
    that commits block by block gets a run for each commit.

    Raises:
        ConfigError: it ranks no runs (`reuse`), or there is none of that name.
    """
    if name not in RANKING_POLICIES:
        known = ", ".join(RANKING_POLICIES)
        raise ConfigError(f"eviction_policy is {name!r}; where nodes go whole, use one of {known}")
    return RANKING_POLICIES[name](clock, keeps_borders=True)
