"""The eviction policy of a running cache: which it is, and another one in its place."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import PolicyChanged
from fastdeploy_cache.books.leaves.policy import Clock, LeastRecentlyUsed
from fastdeploy_cache.books.tenants.policies import TenantPolicies
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.looks.pieces import run_in_turns
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.policies import EVICTION_POLICIES, new_policy
from fastdeploy_cache.policies.eviction import RANKING_POLICIES

logger = event_log(__name__)


@dataclass(frozen=True, kw_only=True)
class PolicyView:
    """The eviction policy in force, that of the configuration, and those that may be chosen."""

    name: str
    configured: str
    known: tuple[str, ...]


def policy_now(books: Books, config: CacheConfig) -> PolicyView:
    """See `PolicyView`. Any thread."""
    return PolicyView(name=books.tree.policy.name, configured=config.eviction_policy, known=EVICTION_POLICIES)


def change_policy(books: Books, config: CacheConfig, clock: Clock, name: str) -> PolicyView:
    """See `Control.set_policy`; by one thread at a time."""
    if name not in EVICTION_POLICIES:
        raise ControlError(f"there is no eviction policy {name!r}; use one of {', '.join(EVICTION_POLICIES)}")
    policy, num_blocks, size = books.tree.policy, max(pool.num_blocks for pool in books.pools), config.block_size
    chosen = new_policy(
        name, clock, num_blocks=num_blocks, block_tokens=size, history_bytes=config.eviction_history_bytes
    )
    run_in_turns(books, _move_all(books))  # of a change before, if that has ended early
    with books:
        books.check_open()
        if isinstance(policy, TenantPolicies):
            raise ControlError("each tenant has a policy of its own here; set eviction_policy and restart to change it")
        before = policy.chosen
        if not isinstance(before, LeastRecentlyUsed):
            raise ControlError(f"the eviction policy {policy.name} was given by the program; only it can change it")
        if before.keeps_borders:
            raise ControlError("this cache evicts whole nodes, as an adapter has asked; its policy stays")
        if name == policy.name:
            return policy_now(books, config)
        # Samples of blocks that an earlier one has taken are still there, and not known to a new one.
        if name == "reuse" and policy.has_served(name):
            text = "reuse was in force before, and has not seen what was lost since; restart to have it again"
            raise ControlError(text)
        policy.follow_with(chosen)
        if books.rows is not None:
            books.rows.follow_with(RANKING_POLICIES.get(name, LeastRecentlyUsed)(clock))
        books.note(PolicyChanged(name=name))
        logger.info("event=eviction_policy name=%s before=%s", name, before.name)
    run_in_turns(books, _move_all(books))
    return policy_now(books, config)


def _move_all(books: Books) -> Iterator[None]:
    rows = books.rows
    while books.tree.policy.move_some() or (rows is not None and rows.checkpoints.policy.move_some()):
        yield
