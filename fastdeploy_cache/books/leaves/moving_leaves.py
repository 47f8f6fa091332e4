"""The leaves that one eviction policy leaves to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from fastdeploy_cache.books.leaves.leaf_order import IsLeaf, LeafOrder, Piece
from fastdeploy_cache.books.run import CPU, GPU, TIERS, Run, Tier

_A_TIME = 16  # leaves: some tens of microseconds


class MovingLeaves:
    """A million leaves cannot be put into another order at once: it takes a second. So they stay in the order that they
    have, and are evicted by it before all others, while a few at a time, the last to be evicted first,
    are told to the new policy. Under the lock.

    A leaf stands where its mark says (see `LeafOrder`): in the old order as long as the mark is the rank of its place
    there. Whatever the new policy is told of it meanwhile gives it another mark.
    """

    def __init__(self, orders: Sequence[LeafOrder], successors: Sequence[LeafOrder], is_leaf: IsLeaf) -> None:
        """`orders` are those of the old policy, which has nothing any more; `successors` are empty."""
        handed = [order.hand_over() for order in orders]
        self._pieces: list[list[Piece]] = [pieces for pieces, _ in handed]  # by Tier
        self._past = [piece for _, past in handed for piece in past]
        self._successors, self._is_leaf = successors, is_leaf
        self._is_over = False
        for order in successors:
            order.has_strangers = True

    def forget(self) -> None:
        """Nothing is cached any more: what is left is only to be let go."""
        self._is_over = True
        for order in self._successors:
            order.has_strangers = False

    def first(self, tier: Tier) -> Run | None:
        """The leaf that goes next of those that have not been moved."""
        pieces = self._pieces[tier] if not self._is_over else []
        while pieces:
            ranks, runs = pieces[0]
            if _mark(runs[0], tier) == ranks[0]:
                if self._is_leaf(runs[0], tier):
                    return runs[0]
                _unmark(runs[0], tier)
            del ranks[0], runs[0]
            if not ranks:
                del pieces[0]
        return None

    def walk(self, tier: Tier) -> Iterator[Run]:
        """All that have not been moved, in their order. Nothing may change meanwhile."""
        for ranks, runs in self._pieces[tier] if not self._is_over else []:
            for rank, run in zip(ranks, runs, strict=True):
                if _mark(run, tier) == rank and self._is_leaf(run, tier):
                    yield run

    def move_some(self, push: Callable[[Run, Tier], None]) -> bool:
        """Tell the new policy of a few; whether more are left."""
        for tier in TIERS:
            pieces = self._pieces[tier]
            if pieces:
                self._move(pieces, tier, push)
                return True
        if self._past:
            self._past.pop()
            return True
        for order in self._successors:
            order.has_strangers = False
        return False

    def _move(self, pieces: list[Piece], tier: Tier, push: Callable[[Run, Tier], None]) -> None:
        ranks, runs = pieces[-1]
        for _ in range(min(_A_TIME, len(runs))):
            rank, run = ranks.pop(), runs.pop()
            if not self._is_over and _mark(run, tier) == rank:
                _unmark(run, tier)
                if self._is_leaf(run, tier):
                    push(run, tier)
        if not runs:
            pieces.pop()


def _mark(run: Run, tier: Tier) -> object:
    return run.queued_gpu if tier is GPU else run.queued_cpu


def _unmark(run: Run, tier: Tier) -> None:
    if tier is CPU:
        run.queued_cpu = None
    else:
        run.queued_gpu = None
