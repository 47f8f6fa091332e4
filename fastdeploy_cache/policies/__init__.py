"""Decisions: state in, choice out. Nothing here moves a block."""

from __future__ import annotations

from fastdeploy_cache.books.leaves.policy import Clock, EvictionPolicy, LeastRecentlyUsed
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.policies.eviction import RANKING_POLICIES

EVICTION_POLICIES = (*RANKING_POLICIES, "reuse")
DEFAULT_HISTORY_BYTES, MIN_HISTORY_BYTES = 16 * 2**20, 2**20


def new_policy(
    name: str,
    clock: Clock,
    *,
    num_blocks: int,
    block_tokens: int,
    history_bytes: int = DEFAULT_HISTORY_BYTES,
    tree_tokens: int | None = None,
) -> LeastRecentlyUsed:
    """The eviction policy of that name, for a cache whose larger tier has `num_blocks` of `block_tokens` tokens.

    `tree_tokens`: how many tokens a block of the tree has, where they stand for `block_tokens`.
    """
    if name == "reuse":
        from fastdeploy_cache.policies.reuse import Reuse  # late: it is much of the policies

        return Reuse(clock, num_blocks, block_tokens, history_bytes, tree_tokens=tree_tokens)
    return RANKING_POLICIES[name](clock)


def check_policy(policy: EvictionPolicy | None) -> None:
    """Raise `ConfigError` where something is given that is none."""
    for name in vars(EvictionPolicy) if policy is not None else ():
        if not name.startswith("_") and not callable(getattr(policy, name, None)):
            what = "give an object with all calls of `EvictionPolicy`, or set eviction_policy to a name"
            raise ConfigError(f"policy is {policy!r}, which has no call {name!r}; {what}")
