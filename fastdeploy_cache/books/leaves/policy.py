"""Which leaf of the tree loses its tail next: the interface, and what goes by the last use."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from fastdeploy_cache.books.leaves.leaf_order import IsLeaf, LeafOrder
from fastdeploy_cache.books.run import CPU, GPU, Run, Tier

Split = Callable[[Run, int], Run]
Clock = Callable[[], float]


class SessionHint(NamedTuple):
    """What a request says of its session. Numbers stand for names; 0: nothing is said.

    `going`: 1 to 4, the quarter in which the stated chance lies that it goes on.
    """

    session: int
    going: int
    tool: int
    num_answer_tokens: int


NO_SESSION = SessionHint(0, 0, 0, 0)


class Hints(Protocol):
    """What of a request a policy may go by. See `Request`, which has all of it."""

    @property
    def priority(self) -> float | None: ...
    @property
    def keep_seconds(self) -> float | None: ...

    session_ended: bool
    tool_call_pending: bool

    @property
    def session_hint(self) -> SessionHint | None: ...


class Asked(NamedTuple):
    """What a match looked for, and how much of that was cached, in blocks from the front."""

    num_asked: int
    num_found: int


class EvictionPolicy(Protocol):
    """Decides by `run.usage` and by what it is told. One thread at a time: under the cache's lock."""

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        """Nothing is cached (any more).

        `is_leaf(run, tier)` says whether a run may lose its tail in a tier now. `split(run, num_blocks)` cuts a run so
        that its parts can be used differently and returns the upper part.
        """
        ...

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        """A request whose prefix lies on `path` is released, the first time after it was admitted."""
        ...

    def touch(self, path: Sequence[Run]) -> None:
        """A request is released once more, after a preemption: it counts no further, but it was here."""
        ...

    def grow(self, run: Run, first_block: int) -> None:
        """A run has got blocks from `first_block` on."""
        ...

    def shrink(self, run: Run, first_block: int) -> None:
        """A run is about to lose its blocks from `first_block` on, in all tiers."""
        ...

    def push(self, run: Run, tier: Tier) -> None:
        """A run has become a leaf of a tier, or has changed while it is one."""
        ...

    def pull(self, run: Run, tier: Tier) -> None:
        """A run that may have been pushed is no leaf of a tier any more: it has a child there, or is gone. Of one that
        is held, for a while or before it goes, nothing is said."""
        ...

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        """The leaf to take from next, and how much of its tail at most, when `num_blocks` have to go.

        The caller knows that there is a leaf, and takes at least a block of it.
        """
        ...

    def coldest(self, tier: Tier) -> Generator[Run]:
        """Leaves, about in the order in which they would be victims. To be closed before anything else is called."""
        ...

    def is_colder(self, run: Run, than: Run) -> bool:
        """Whether a run is certainly worth less than another."""
        ...

    def alike(self, upper: Run, lower: Run) -> bool:
        """Whether a run and its only child may become one: no decision would depend on which of them a block is in."""
        ...


class LeastRecentlyUsed:
    """`lru`: what was used longest ago goes first. The other ranking policies differ in `rank`, and in what of it may
    become one run without loss."""

    name = "lru"

    def __init__(self, clock: Clock, *, keeps_borders: bool = False, num_uses: int = 0) -> None:
        """`keeps_borders`: a run ends where an insert has ended. It is never extended in place, nor joined with the run
        behind it: else what several calls have inserted would be one run, and whole runs could not go one by one.
        `num_uses`: of another policy, which this one goes on from."""
        self._clock = clock
        self.keeps_borders = keeps_borders
        self._num_uses = num_uses
        self._orders: tuple[LeafOrder, ...] = ()  # by Tier

    def go_on_from(self, other: LeastRecentlyUsed) -> None:
        """Count the uses of the cache on from where another policy is."""
        self._num_uses = other._num_uses

    @property
    def orders(self) -> tuple[LeafOrder, ...]:
        """The leaves of each tier, by Tier; none before `clear`."""
        return self._orders

    def rank(self, run: Run) -> Any:
        """Lowest goes first."""
        return run.last_used

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:  # noqa: ARG002
        past = [order.pieces for order in self._orders] or [[], []]
        self._orders = tuple(LeafOrder(tier, self.rank, is_leaf, past[tier]) for tier in Tier)
        self._is_leaf = is_leaf

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:  # noqa: ARG002
        for run in path:
            run.num_uses += 1
        self.touch(path)

    def touch(self, path: Sequence[Run]) -> None:
        self._num_uses += 1
        for run in path:
            run.last_used = self._num_uses
        self._push_leaves(path)

    def _push_leaves(self, path: Sequence[Run]) -> None:
        """Rank the leaves of a path anew: what is behind a pin can be one. What is held is pushed when it is let go."""
        for run in path:
            if run.queued_gpu is not None and self._is_leaf(run, GPU):
                self.push(run, GPU)
            if run.queued_cpu is not None and self._is_leaf(run, CPU):
                self.push(run, CPU)

    def grow(self, run: Run, first_block: int) -> None:  # noqa: ARG002
        if self.keeps_borders:
            run.is_shared = True  # what comes next becomes a run of its own

    def shrink(self, run: Run, first_block: int) -> None:
        pass

    def push(self, run: Run, tier: Tier) -> None:
        self._orders[tier].push(run)

    def pull(self, run: Run, tier: Tier) -> None:
        self._orders[tier].pull(run)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        return self._orders[tier].first(), num_blocks

    def coldest(self, tier: Tier) -> Generator[Run]:
        return self._orders[tier].walk()

    def is_colder(self, run: Run, than: Run) -> bool:
        return bool(self.rank(run) < self.rank(than))

    def alike(self, upper: Run, lower: Run) -> bool:
        return not self.keeps_borders and self.are_ranked_alike(upper, lower)

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:  # noqa: ARG002
        """Whether their ranks order them among the others as one run's would."""
        return True
