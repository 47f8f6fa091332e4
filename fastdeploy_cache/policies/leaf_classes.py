"""The leaves of one tier, where each class has an order of its own: the one with the lowest score."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from itertools import islice

from fastdeploy_cache.books.leaves.leaf_order import LeafOrder
from fastdeploy_cache.books.run import Run

_USE_BITS = 48
_NUM_ALL = 64  # so few leaves are all scored
_NUM_POINTS = 6  # else so many of each class
_MAX_USES, _LEAVES_PER_USE = 64, 32  # scores are kept for one use in so many leaves, and so many uses at most
_MAX_SCORED = 2048
Score = tuple[float, int]  # and the order of last use, of equal ones


def rank_of(run: Run) -> int:
    """The place among all leaves: by class, then by last use."""
    return run.notes.reuse_class << _USE_BITS | run.last_used


class LeafClasses:
    """Within a class a score follows from the age alone, and it changes slowly. So a few leaves of each class, that
    which was used longest ago and others spread over the ages, are scored once for several uses. Where one of them is
    gone, the next of its class stands for it.

    Where all scores are 0, the one that was used longest ago is found exactly.
    """

    def __init__(self, order: LeafOrder, score: Callable[[Run], Score]) -> None:
        """`order` is by `rank_of`."""
        self._order = order
        self._score = score
        self._firsts: dict[int, int] = {}  # by class: it has no leaf of a lower rank, and one of this rank is scored
        self._scored: list[tuple[Score, int]] = []  # with ranks; a heap
        self._num_points = 1
        self._num_uses = self._num_uses_left = 0

    def push(self, run: Run) -> None:
        """Tell of a leaf that the order has got."""
        rank = rank_of(run)
        first = self._firsts.get(rank >> _USE_BITS)
        if first is None or rank < first:
            self._firsts[rank >> _USE_BITS] = rank
        if len(self._scored) < _MAX_SCORED:
            heapq.heappush(self._scored, (self._score(run), rank))
        elif self._num_uses_left > 0:  # many have come and none has gone
            self._scored, self._num_uses_left = [], 0

    def age(self, num_uses: int) -> None:
        """A request has used something, as the latest of so many."""
        self._num_uses = num_uses
        self._num_uses_left -= 1

    def rescore(self, *, is_lru: bool) -> None:
        """Other scores hold from now on. `is_lru`: they are all 0."""
        self._num_uses_left = 0
        self._num_points = 1 if is_lru else _NUM_POINTS

    def lowest(self) -> Run:
        """The leaf with the lowest score of those that are scored; there is a leaf."""
        if self._num_uses_left <= 0:
            self._score_some()
        scored = self._scored
        while scored:
            rank = scored[0][1]
            run = self._order.first_from(rank)
            if run is not None and rank_of(run) == rank:
                return run
            heapq.heappop(scored)
            self._add(rank >> _USE_BITS, rank, run)
        return self._order.first()

    def _score_some(self) -> None:
        num_leaves = len(self._order)
        self._num_uses_left = min(_MAX_USES, 1 + num_leaves // _LEAVES_PER_USE)
        self._scored = []
        if num_leaves <= _NUM_ALL:
            self._firsts = {}
            for run in self._order.walk():
                rank = rank_of(run)
                self._firsts.setdefault(rank >> _USE_BITS, rank)
                self._scored.append((self._score(run), rank))
            heapq.heapify(self._scored)
            return
        for number, first in list(self._firsts.items()):
            last = max(first, (number << _USE_BITS) + self._num_uses)
            for low in range(first, last + 1, (last - first) // self._num_points + 1):
                if not self._add(number, low, self._order.first_from(low)):
                    break

    def _add(self, number: int, low: int, run: Run | None) -> bool:
        """Score the first leaf from a rank on, if it is of that class."""
        rank = rank_of(run) if run is not None else -1
        is_first = self._firsts.get(number) == low
        if run is None or rank >> _USE_BITS != number:
            if is_first:
                del self._firsts[number]
            return False
        if is_first:
            self._firsts[number] = rank
        heapq.heappush(self._scored, (self._score(run), rank))
        return True

    def some(self, num_leaves: int) -> list[Run]:
        """The first leaves of each class, about so many together."""
        num_each = -(-num_leaves // max(1, len(self._firsts)))
        return [run for walk in self._walks() for run in islice(walk, num_each)]

    def by_last_use(self) -> Generator[Run]:
        """All leaves in the order of their last use."""
        yield from heapq.merge(*self._walks(), key=lambda run: run.last_used)

    def _walks(self) -> list[Generator[Run]]:
        return [self._order.walk(first, (number + 1) << _USE_BITS) for number, first in self._firsts.items()]
