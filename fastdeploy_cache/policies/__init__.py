"""Decisions: state in, choice out. Nothing here moves a block."""

from __future__ import annotations

from fastdeploy_cache.policies.eviction import RANKING_POLICIES, Clock, EvictionPolicy

EVICTION_POLICIES = tuple(RANKING_POLICIES)


def new_policy(name: str, clock: Clock) -> EvictionPolicy:
    """The eviction policy of that name."""
    return RANKING_POLICIES[name](clock)
