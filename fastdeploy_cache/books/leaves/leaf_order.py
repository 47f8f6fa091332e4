"""The leaves of one tier in the order of their ranks, which change while they wait."""

from __future__ import annotations

import heapq
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Generator
from typing import Any

from fastdeploy_cache.books.run import ID_BYTES, Run, Tier

IsLeaf = Callable[[Run, Tier], bool]
Piece = tuple[list[Any], list[Run]]  # ranks, lowest first, and whose they are; never empty
PIECE = 512  # leaves: to add one, or to take one out, moves so many pointers and finds its place in so many ranks
_A_TIME = 64  # leaves of an order that is over which each push to the next one lets go


class LeafOrder:
    """Leaves of one tier by rank, lowest first, and equal ones as they came: a sorted list in pieces, so that nothing
    is ever rebuilt or looked through. To add, to move or to take out one leaf takes two bisections, and moves the
    pointers of a piece and, where a piece comes or goes, those of the list of pieces.

    A run notes the rank that it stands under (`Run.queued_gpu`, `Run.queued_cpu`). What stands under another one, or is
    no leaf any more, is put right or dropped when it comes up; that stays rare, since a leaf whose rank has changed is
    pushed again, and what ceases to be one is pulled. What is held by a pin stays where it is meanwhile.
    """

    def __init__(self, tier: Tier, rank: Callable[[Run], Any], is_leaf: IsLeaf, past: list[Piece]) -> None:
        """`past`: `pieces` of an order that is over. A million leaves cannot be let go at once."""
        self._tier = tier
        self._rank = rank
        self._is_leaf = is_leaf
        self._mark = "queued_cpu" if tier else "queued_gpu"
        self._starts: list[Any] = []  # by piece: none of its ranks is lower, none before it is higher
        self._pieces: list[Piece] = []
        self._past = past
        self.has_strangers = False  # runs may have a mark of an order that this one follows; see `MovingLeaves`

    @property
    def pieces(self) -> list[Piece]:
        """All there is, also of the orders before this one."""
        return [*self._past, *self._pieces]

    def hand_over(self) -> tuple[list[Piece], list[Piece]]:
        """All leaves as they stand, and those of orders before: another order's from now on."""
        pieces, past = self._pieces, self._past
        self._pieces, self._past, self._starts = [], [], []
        return pieces, past

    def __len__(self) -> int:
        """How many it holds, with those that are no leaves any more."""
        return sum([len(ranks) for ranks, _ in self._pieces])

    def push(self, run: Run) -> None:
        """A run has become a leaf, or its rank may have changed."""
        if self._past:
            self._let_go()
        rank, queued = self._rank(run), getattr(run, self._mark)
        if queued == rank:
            return
        if queued is not None:
            if not self.has_strangers or self._has(run, queued):
                self._take_out(run, queued)
            setattr(run, self._mark, None)  # if there is no memory for its new place it has none
        self._put_in(run, rank)
        setattr(run, self._mark, rank)

    def pull(self, run: Run) -> None:
        """A run is no leaf any more."""
        queued = getattr(run, self._mark)
        if queued is None:
            return
        if (self.has_strangers and not self._has(run, queued)) or self._take_out(run, queued):
            setattr(run, self._mark, None)

    def _has(self, run: Run, rank: Any) -> bool:
        """Whether a run stands here under that rank, which may be one of another order and of another kind."""
        try:
            at = bisect_right(self._starts, rank) - 1
            if at < 0:
                return False
            ranks, runs = self._pieces[at]
            return any(each is run for each in runs[bisect_left(ranks, rank) : bisect_right(ranks, rank)])
        except TypeError:  # a number and a tuple have no order
            return False

    def first(self) -> Run:
        """The leaf with the lowest rank; there is one."""
        ranks, runs = self._pieces[0]
        rank, run, is_leaf, rank_of = ranks[0], runs[0], self._is_leaf, self._rank
        if getattr(run, self._mark) == rank and is_leaf(run, self._tier) and rank_of(run) == rank:
            return run
        found = self.first_from(None)
        assert found is not None
        return found

    def first_from(self, low: Any) -> Run | None:
        """The leaf with the lowest rank that is not below `low`, or of all if that is None."""
        tier, mark, pieces = self._tier, self._mark, self._pieces
        while pieces:
            at, place = (0, 0) if low is None else self._place_of(low)
            if at == len(pieces):
                break
            ranks, runs = pieces[at]
            queued, run = ranks[place], runs[place]
            is_leaf = False
            if getattr(run, mark) == queued:
                is_leaf = self._is_leaf(run, tier)
                rank = self._rank(run) if is_leaf else None
                if rank == queued:
                    return run
                setattr(run, mark, None)
            del ranks[place], runs[place]
            if not ranks:
                del pieces[at], self._starts[at]
            if is_leaf:
                self._put_in(run, rank)
                setattr(run, mark, rank)
        return None

    def first_small(self, num_blocks: int) -> list[Run]:
        """The leaves that `first` would name one after the other, as long as each can go whole: it is in this tier
        alone, has with those before it at most `num_blocks`, and its parent becomes no leaf by that. They stay, for
        `drop_first`."""
        tier, mark, rank_of = self._tier, self._mark, self._rank
        while self._pieces and getattr(self._pieces[0][1][0], mark) != self._pieces[0][0][0]:
            self.drop_first(1)  # it stands elsewhere by now, or is gone
        ranks, runs = self._pieces[0] if self._pieces else ([], [])
        num_left, num_small, root = num_blocks * ID_BYTES, 0, None
        for rank, run in zip(ranks, runs, strict=True):
            parent = run.parent
            num_left -= len(run.cpu if tier else run.gpu)
            if num_left < 0 or (run.gpu if tier else run.cpu) or run.num_held or run.children or parent is None:
                break
            if parent is not root:
                if parent.parent is None:
                    root = parent
                elif parent.num_children_in(tier) <= num_small + 1:
                    break
            if getattr(run, mark) != rank or rank_of(run) != rank:
                break
            num_small += 1
        return runs[:num_small]

    def drop_first(self, num_leaves: int) -> None:
        """The first so many, of one piece, have gone."""
        ranks, runs = self._pieces[0]
        del ranks[:num_leaves], runs[:num_leaves]
        if not ranks:
            del self._pieces[0], self._starts[0]

    def _place_of(self, low: Any) -> tuple[int, int]:
        """The piece, and the place in it, of the first rank that is not below `low`; behind the last piece if none."""
        at = max(0, bisect_left(self._starts, low) - 1)
        ranks = self._pieces[at][0]
        place = bisect_left(ranks, low)
        return (at, place) if place < len(ranks) else (at + 1, 0)

    def walk(self, low: Any = None, high: Any = None) -> Generator[Run]:
        """Leaves in the order of their ranks, from `low` on and below `high` where these are given. Nothing may be
        pushed or pulled meanwhile."""
        risen: list[tuple[Any, int, Run]] = []  # their turn is later
        num_risen = 0
        for queued, run in self._entries(low, high):
            while risen and risen[0][0] < queued:
                yield heapq.heappop(risen)[2]
            if getattr(run, self._mark) == queued and self._is_leaf(run, self._tier):
                rank = self._rank(run)
                if rank > queued:
                    num_risen += 1
                    heapq.heappush(risen, (rank, num_risen, run))
                else:
                    yield run
        while risen:
            yield heapq.heappop(risen)[2]

    def _entries(self, low: Any, high: Any) -> Generator[tuple[Any, Run]]:
        at, place = (0, 0) if low is None or not self._pieces else self._place_of(low)
        for ranks, runs in self._pieces[at:]:
            for number in range(place, len(ranks)):
                if high is not None and ranks[number] >= high:
                    return
                yield ranks[number], runs[number]
            place = 0

    def _put_in(self, run: Run, rank: Any) -> None:
        """Place it behind those of the same rank; all of it or, on `MemoryError`, nothing."""
        starts, pieces = self._starts, self._pieces
        if pieces and rank < pieces[-1][0][-1]:
            at = max(0, bisect_right(starts, rank) - 1)
            ranks, runs = pieces[at]
            place = bisect_right(ranks, rank)
        elif pieces and len(pieces[-1][0]) < PIECE:
            at, (ranks, runs) = len(pieces) - 1, pieces[-1]
            place = len(ranks)
        else:
            pieces.append(([rank], [run]))
            starts.append(rank)
            return
        runs.insert(place, run)
        try:
            ranks.insert(place, rank)
        except BaseException:
            del runs[place]
            raise
        if place == 0:
            starts[at] = rank
        if len(ranks) > 2 * PIECE:
            pieces[at : at + 1] = [(ranks[:PIECE], runs[:PIECE]), (ranks[PIECE:], runs[PIECE:])]
            starts.insert(at + 1, ranks[PIECE])

    def _take_out(self, run: Run, rank: Any) -> bool:
        """Whether it was found: of many with the same rank, in more than one piece, not all are looked at."""
        at = bisect_right(self._starts, rank) - 1
        if at < 0:
            return False
        ranks, runs = self._pieces[at]
        place = bisect_left(ranks, rank)
        if place == len(runs) or runs[place] is not run:
            try:
                place = runs.index(run, place, bisect_right(ranks, rank))
            except ValueError:
                return False
        del ranks[place], runs[place]
        if len(ranks) < PIECE // 4:
            self._join(at)
        return True

    def _join(self, at: int) -> None:
        """A piece has become small: it goes, or it becomes one with a neighbour, where that is small, too."""
        starts, pieces = self._starts, self._pieces
        if not pieces[at][0]:
            del pieces[at], starts[at]
            return
        for first in (at - 1, at):
            if first >= 0 and first + 1 < len(pieces):
                (ranks, runs), (more_ranks, more_runs) = pieces[first], pieces[first + 1]
                if len(ranks) + len(more_ranks) <= PIECE:
                    pieces[first] = ranks + more_ranks, runs + more_runs
                    del pieces[first + 1], starts[first + 1]
                    return

    def _let_go(self) -> None:
        """Forget some leaves of the orders before this one."""
        ranks, runs = self._past[-1]
        del ranks[-_A_TIME:], runs[-_A_TIME:]
        if not ranks:
            self._past.pop()
