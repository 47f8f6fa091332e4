"""An eviction policy that cannot fail a verb: one that raises is replaced by `lru`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable
from typing import Any

from fastdeploy_cache.mishaps import Mishaps
from fastdeploy_cache.policies.eviction import EvictionPolicy, IsLeaf, LeastRecentlyUsed, Split
from fastdeploy_cache.run import TIERS, Run, Tier


def _passed_on(name: str) -> Callable[..., Any]:
    """The method of that name of the policy in use; where it raises, of the one that takes over."""

    def call(self: GuardedPolicy, *args: Any) -> Any:
        try:
            return getattr(self.chosen, name)(*args)
        except Exception:  # the policy of somebody else's making, or its clock
            return getattr(self.replace(), name)(*args)

    call.__doc__ = f"See `EvictionPolicy.{name}`."
    return call


class GuardedPolicy:
    """See `EvictionPolicy`. Under the cache's lock.

    A policy hears of every change while the change is being made. If it raised into that, blocks would be neither where
    they were nor where they should be. What it raises ends its service instead: `lru` takes over, by the order of uses
    that every ranking policy keeps, and nothing that is cached is lost. `reset` does not bring the old one back.
    """

    use, touch, grow, shrink = map(_passed_on, ("use", "touch", "grow", "shrink"))
    push, is_colder, alike = map(_passed_on, ("push", "is_colder", "alike"))
    _clear, _victim, _coldest = map(_passed_on, ("clear", "victim", "coldest"))

    def __init__(self, chosen: EvictionPolicy, mishaps: Mishaps, runs: Callable[[], Iterable[Run]]) -> None:
        """`runs` gives every run there is."""
        self.chosen = chosen
        self._mishaps, self._runs = mishaps, runs

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        """See `EvictionPolicy.clear`."""
        self._is_leaf, self._split = is_leaf, split
        self._clear(is_leaf, split)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        """See `EvictionPolicy.victim`; never a run that may lose nothing, whatever the policy says."""
        run, at_most = self._victim(tier, num_blocks)
        if at_most > 0 and self._is_leaf(run, tier):
            return run, at_most
        return self.replace().victim(tier, num_blocks)

    def coldest(self, tier: Tier) -> Generator[Run]:
        """See `EvictionPolicy.coldest`."""
        runs = self._coldest(tier)
        try:
            yield from runs
        except Exception:
            self.replace()

    def replace(self) -> EvictionPolicy:
        """Let `lru` take over. Walks the tree, once."""
        self._mishaps.note("policy")
        num_uses = max((run.usage.last_used for run in self._runs()), default=0)
        keeps_borders = getattr(self.chosen, "keeps_borders", False)
        self.chosen = chosen = LeastRecentlyUsed(lambda: 0.0, keeps_borders=keeps_borders, num_uses=num_uses)
        chosen.clear(self._is_leaf, self._split)
        for run in self._runs():
            for tier in TIERS:
                run.queued[tier] = None
                if self._is_leaf(run, tier):
                    chosen.push(run, tier)
        return chosen
