"""An eviction policy that cannot fail a verb: one that raises is replaced by `lru`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from time import monotonic
from typing import Any

from fastdeploy_cache.books.mishaps import Mishaps
from fastdeploy_cache.books.run import TIERS, Run, Tier
from fastdeploy_cache.books.use_times import UseTimes
from fastdeploy_cache.policies.eviction import EvictionPolicy, LeastRecentlyUsed, Split
from fastdeploy_cache.policies.leaf_order import IsLeaf

_TOLD = ("use", "touch", "grow", "shrink", "push", "pull")  # and asked for nothing
_PASSED_ON = (*_TOLD, "is_colder", "alike", "clear", "coldest")


class GuardedPolicy:
    """See `EvictionPolicy`. Under the cache's lock.

    A policy hears of every change while the change is being made. If it raised into that, blocks would be neither where
    they were nor where they should be. What it raises ends its service instead: `lru` takes over, by the order of uses
    that every ranking policy keeps, and nothing that is cached is lost. `reset` does not bring the old one back.
    """

    use: Callable[..., None]
    touch: Callable[..., None]
    grow: Callable[..., None]
    shrink: Callable[..., None]
    push: Callable[..., None]
    pull: Callable[..., None]
    is_colder: Callable[..., bool]
    alike: Callable[..., bool]

    def __init__(self, chosen: EvictionPolicy, mishaps: Mishaps, runs: Callable[[], Iterable[Run]]) -> None:
        """`runs` gives every run there is."""
        self._mishaps, self._runs = mishaps, runs
        self.times = UseTimes()
        self._serve_by(chosen)

    def _serve_by(self, chosen: EvictionPolicy) -> None:
        """Pass everything on to this policy, and what it raises for to the one that takes over. Bound once: a policy is
        told of every block of a decode step."""
        self.chosen = chosen
        self.hears_growth = _overrides(chosen, "grow") or getattr(chosen, "keeps_borders", False)
        self.hears_losses = _overrides(chosen, "shrink")
        self.has_marks = isinstance(chosen, LeastRecentlyUsed)  # else nobody knows what it has been told of
        calls = {name: self._passed_on(name) for name in _PASSED_ON}
        calls |= {name: self._timed(calls[name]) for name in ("use", "touch")}
        self._clear, self._coldest, self._victim = calls.pop("clear"), calls.pop("coldest"), chosen.victim
        self._names_leaves = getattr(chosen.victim, "__func__", None) is LeastRecentlyUsed.victim
        vars(self).update(calls)

    def _passed_on(self, name: str) -> Callable[..., Any]:
        method = getattr(self.chosen, name)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except Exception:  # the policy of somebody else's making, or its clock
                successor = self.replace()
            try:
                return getattr(successor, name)(*args)
            except MemoryError:
                if name not in _TOLD:
                    raise
                self._mishaps.note("policy")  # what it has not heard of is evicted later than it could be
                return None

        return call

    def _timed(self, tell: Callable[..., None]) -> Callable[..., None]:
        """Tell of a use of a path, and note when it was."""
        times = self.times

        def call(path: Sequence[Run], *args: Any) -> None:
            tell(path, *args)
            if path and (now := monotonic()) >= times.next_at:
                times.note(path[-1].usage.last_used, now)

        return call

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        """See `EvictionPolicy.clear`."""
        self._is_leaf, self._split = is_leaf, split
        self._clear(is_leaf, split)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        """See `EvictionPolicy.victim`; never a run that may lose nothing, whatever the policy says."""
        try:
            named = self._victim(tier, num_blocks)
            if self._names_leaves:
                return named
        except Exception:  # as above
            return self.replace().victim(tier, num_blocks)
        if type(named) is tuple and len(named) == 2:
            run, at_most = named
            if type(run) is Run and type(at_most) is int and at_most > 0 and self._is_leaf(run, tier):
                return run, at_most
        return self.replace().victim(tier, num_blocks)

    def coldest(self, tier: Tier) -> Generator[Run]:
        """See `EvictionPolicy.coldest`."""
        runs = self._coldest(tier)
        try:
            for run in runs:
                if type(run) is not Run:
                    raise TypeError(f"the eviction policy calls {run!r} the coldest run")
                yield run
        except Exception:
            self.replace()
        finally:
            runs.close()

    def replace(self) -> EvictionPolicy:
        """Let `lru` take over. Walks the tree, once."""
        self._mishaps.note("policy")
        num_uses = max((run.usage.last_used for run in self._runs()), default=0)
        keeps_borders = getattr(self.chosen, "keeps_borders", False)
        chosen = LeastRecentlyUsed(lambda: 0.0, keeps_borders=keeps_borders, num_uses=num_uses)
        self._serve_by(chosen)
        chosen.clear(self._is_leaf, self._split)
        for run in self._runs():
            run.queued_gpu = run.queued_cpu = None
            for tier in TIERS:
                if self._is_leaf(run, tier):
                    chosen.push(run, tier)
        return chosen


def _overrides(policy: EvictionPolicy, name: str) -> bool:
    """Whether a policy does anything when it is told so: most do not, and each block of a decode step is told."""
    method = getattr(getattr(policy, name), "__func__", None)
    return method is not getattr(LeastRecentlyUsed, name)
