"""One eviction policy for each tenant, asked as if they were one."""

from __future__ import annotations

import contextlib
import heapq
from collections.abc import Generator, Sequence

from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.leaves.leaf_order import IsLeaf
from fastdeploy_cache.books.leaves.policy import Asked, EvictionPolicy, Hints, Split
from fastdeploy_cache.books.run import Run, Tier


def last_use(run: Run) -> float:
    """When a run was last used, or got its first blocks, whichever is later; by the clock of `Ages`."""
    return max(run.used_last, run.gpu_since, run.cpu_since)


class TenantPolicies:
    """See `GuardedPolicy`, which each of them is.

    Within a tenant its own policy decides. Between tenants goes first what was used longest ago: their ranks are of
    different orders, and only time is the same for all. Under the cache's lock.
    """

    def __init__(self, policies: Sequence[GuardedPolicy]) -> None:
        """`policies` are by tenant; the first is the rest's."""
        self.policies = policies
        self.name = policies[0].name

    @property
    def chosen(self) -> EvictionPolicy:
        """That of the rest."""
        return self.policies[0].chosen

    @property
    def hears_growth(self) -> bool:
        """Whether one of them needs to be told."""
        return any(policy.hears_growth for policy in self.policies)

    @property
    def hears_losses(self) -> bool:
        """Whether one of them needs to be told."""
        return any(policy.hears_losses for policy in self.policies)

    @property
    def has_marks(self) -> bool:
        """Whether each marks what it has been told of."""
        return all(policy.has_marks for policy in self.policies)

    def has_served(self, name: str) -> bool:
        """Whether a policy of this name is in force, or has been."""
        return self.policies[0].has_served(name)

    def name_at(self, seconds: float) -> str:
        """Which policy was in force at this time, by the monotonic clock."""
        return self.policies[0].name_at(seconds)

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        """See `EvictionPolicy.clear`."""
        for policy in self.policies:
            policy.clear(is_leaf, split)

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        """See `EvictionPolicy.use`."""
        self.policies[path[0].tenant if path else 0].use(path, request, asked)

    def touch(self, path: Sequence[Run]) -> None:
        """See `EvictionPolicy.touch`."""
        self.policies[path[0].tenant if path else 0].touch(path)

    def grow(self, run: Run, first_block: int) -> None:
        """See `EvictionPolicy.grow`."""
        self.policies[run.tenant].grow(run, first_block)

    def shrink(self, run: Run, first_block: int) -> None:
        """See `EvictionPolicy.shrink`."""
        self.policies[run.tenant].shrink(run, first_block)

    def push(self, run: Run, tier: Tier) -> None:
        """See `EvictionPolicy.push`."""
        self.policies[run.tenant].push(run, tier)

    def pull(self, run: Run, tier: Tier) -> None:
        """See `EvictionPolicy.pull`."""
        self.policies[run.tenant].pull(run, tier)

    def coldest(self, tier: Tier) -> Generator[Run]:
        """See `EvictionPolicy.coldest`. Of each tenant in its own order."""
        with contextlib.ExitStack() as open_walks:
            heads: list[tuple[float, int, Run]] = []
            walks = [open_walks.enter_context(contextlib.closing(each.coldest(tier))) for each in self.policies]
            for number, walk in enumerate(walks):
                if (run := next(walk, None)) is not None:
                    heads.append((last_use(run), number, run))
            heapq.heapify(heads)
            while heads:
                _, number, run = heads[0]
                yield run
                if (following := next(walks[number], None)) is None:
                    heapq.heappop(heads)
                else:
                    heapq.heapreplace(heads, (last_use(following), number, following))

    def is_colder(self, run: Run, than: Run) -> bool:
        """See `EvictionPolicy.is_colder`."""
        if run.tenant == than.tenant:
            return self.policies[run.tenant].is_colder(run, than)
        return last_use(run) < last_use(than)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        """See `EvictionPolicy.victim`. Whose shares allow what is asked of `Shares`."""
        with contextlib.closing(self.coldest(tier)) as walk:
            return next(walk), num_blocks

    @staticmethod
    def small_leaves(_tier: Tier, _num_blocks: int) -> list[Run]:
        """See `GuardedPolicy.small_leaves`. Each leaf is asked for by itself here."""
        return []

    def drop_small_leaves(self, tier: Tier, num_leaves: int) -> None:
        """See `GuardedPolicy.drop_small_leaves`."""

    @staticmethod
    def move_some() -> bool:
        """See `GuardedPolicy.move_some`. None of these follows another one."""
        return False

    def alike(self, upper: Run, lower: Run) -> bool:
        """See `EvictionPolicy.alike`."""
        return self.policies[upper.tenant].alike(upper, lower)
