"""An eviction policy that cannot fail a verb: one that raises is replaced by `lru`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import partial
from typing import Any, cast

from fastdeploy_cache.books.leaves.leaf_order import IsLeaf
from fastdeploy_cache.books.leaves.moving_leaves import MovingLeaves
from fastdeploy_cache.books.leaves.policy import EvictionPolicy, LeastRecentlyUsed, Split
from fastdeploy_cache.books.mishaps import Mishaps
from fastdeploy_cache.books.run import TIERS, Run, Tier
from fastdeploy_cache.ipc.clock import Clock

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

    def __init__(
        self,
        chosen: EvictionPolicy,
        mishaps: Mishaps,
        runs: Callable[[], Iterable[Run]],
        clock: Clock,
        *,
        kind: type = Run,
    ) -> None:
        """`runs` gives every run there is. `kind`: what is ranked, where that is something else with a run's usage."""
        self._kind = kind
        self._mishaps, self._runs, self._now = mishaps, runs, clock.now
        self._moving: MovingLeaves | None = None
        self._served: list[tuple[float, str]] = []  # since when, and the names of this policy and those before it
        self._serve_by(chosen)

    def _serve_by(self, chosen: EvictionPolicy) -> None:
        """Pass everything on to this policy, and what it raises for to the one that takes over. Bound once: a policy is
        told of every block of a decode step."""
        self.chosen = chosen
        self.name = str(getattr(chosen, "name", type(chosen).__name__))
        self._served.append((self._now(), self.name))
        self.hears_growth = _overrides(chosen, "grow") or getattr(chosen, "keeps_borders", False)
        self.hears_losses = _overrides(chosen, "shrink")
        self.has_marks = isinstance(chosen, LeastRecentlyUsed)  # else nobody knows what it has been told of
        calls = {name: self._passed_on(name) for name in _PASSED_ON}
        self._clear, self._coldest, self._victim = calls.pop("clear"), calls.pop("coldest"), chosen.victim
        self._names_leaves = getattr(chosen.victim, "__func__", None) is LeastRecentlyUsed.victim
        for name, call in calls.items():
            setattr(self, name, call)

    def has_served(self, name: str) -> bool:
        """Whether a policy of this name is in force, or has been."""
        return any(name == each for _, each in self._served)

    def name_at(self, seconds: float) -> str:
        """Which policy was in force at this time, by the monotonic clock."""
        return next((name for since, name in reversed(self._served) if since <= seconds), self._served[0][1])

    def _passed_on(self, name: str) -> Callable[..., Any]:
        method = getattr(self.chosen, name)

        def call(*args: Any) -> Any:
            try:
                return method(*args)
            except Exception:  # the policy of somebody else's making, or its clock
                successor = self.replace(concerned=[cast("Run", each) for each in args if type(each) is self._kind])
            try:
                return getattr(successor, name)(*args)
            except MemoryError:
                if name not in _TOLD:
                    raise
                self._mishaps.note("policy")  # what it has not heard of is evicted later than it could be
                return None

        return call

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        """See `EvictionPolicy.clear`."""
        self._is_leaf, self._split = is_leaf, split
        if self._moving is not None:
            self._moving.forget()
        self._clear(is_leaf, split)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        """See `EvictionPolicy.victim`; never a run that may lose nothing, whatever the policy says."""
        if self._moving is not None and (run := self._moving.first(tier)) is not None:
            return run, num_blocks
        call = self._victim
        try:
            named = call(tier, num_blocks)
            if self._names_leaves:
                return named
            if type(named) is tuple and len(named) == 2:
                run, at_most = named
                if type(run) is self._kind and type(at_most) is int and at_most > 0 and self._is_leaf(run, tier):
                    return run, at_most
            raise TypeError(f"the eviction policy's victim is {named!r}; name a leaf of the tier, and 1 block or more")
        except Exception:  # as above
            return self.replace().victim(tier, num_blocks)

    def small_leaves(self, tier: Tier, num_blocks: int) -> list[Run]:
        """What `victim` would name next, as long as each is certain and goes whole (`LeafOrder.first_small`).

        None of a policy that hears of losses, by which its ranks may change, or that is told by other means than marks.
        """
        if self._moving is not None or not self._names_leaves or self.hears_losses or not self.has_marks:
            return []
        try:
            return cast("LeastRecentlyUsed", self.chosen).orders[tier].first_small(num_blocks)
        except Exception:  # as above
            self.replace()
            return []

    def drop_small_leaves(self, tier: Tier, num_leaves: int) -> None:
        """The first of these have gone."""
        cast("LeastRecentlyUsed", self.chosen).orders[tier].drop_first(num_leaves)

    def coldest(self, tier: Tier) -> Generator[Run]:
        """See `EvictionPolicy.coldest`."""
        if self._moving is not None:
            yield from self._moving.walk(tier)
        runs = self._coldest(tier)
        try:
            if runs is None:  # an empty method: it calls nothing cold
                return
            for run in runs:
                if type(run) is not self._kind:
                    raise TypeError(f"the eviction policy calls {run!r} the coldest run")
                yield cast("Run", run)
        except Exception:
            self.replace()
        finally:
            if runs is not None:
                runs.close()

    def follow_with(self, chosen: LeastRecentlyUsed) -> None:
        """Let another policy decide from now on. What is a leaf already stays in the order that it has, and goes first,
        until `move_some` has told the new one of it. Only after a ranking policy, and with nothing left to move."""
        assert isinstance(self.chosen, LeastRecentlyUsed) and self._moving is None
        chosen.go_on_from(self.chosen)
        chosen.clear(self._is_leaf, self._split)
        self._moving = MovingLeaves(self.chosen.orders, chosen.orders, self._is_leaf)
        self._serve_by(chosen)

    def move_some(self) -> bool:
        """Tell the policy of a few of the leaves that one before it knew; whether some are left."""
        if self._moving is not None and not self._moving.move_some(self.push):
            self._moving = None
        return self._moving is not None

    def replace(self, concerned: Sequence[Run] = ()) -> EvictionPolicy:
        """Let `lru` take over. Walks the tree, once. `concerned`: runs that may have left it already."""
        self._mishaps.note("policy")
        self._moving = None
        num_uses = max((run.last_used for run in self._runs()), default=0)
        keeps_borders = getattr(self.chosen, "keeps_borders", False)
        chosen = LeastRecentlyUsed(lambda: 0.0, keeps_borders=keeps_borders, num_uses=num_uses)
        self._serve_by(chosen)
        chosen.clear(self._is_leaf, self._split)
        for run in concerned:
            run.queued_gpu = run.queued_cpu = None
        for run in self._runs():
            run.queued_gpu = run.queued_cpu = None
            for tier in TIERS:
                if self._is_leaf(run, tier):  # what it does not hear of is evicted later than it could be
                    self._mishaps.contain("policy", partial(chosen.push, run, tier))
        return chosen


def _overrides(policy: EvictionPolicy, name: str) -> bool:
    """Whether a policy does anything when it is told so: most do not, and each block of a decode step is told."""
    method = getattr(getattr(policy, name), "__func__", None)
    return method is not getattr(LeastRecentlyUsed, name)
