"""The policies that rank leaves by something else than their last use."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any

from fastdeploy_cache.books.large_dict import LargeDict, put
from fastdeploy_cache.books.leaves.policy import Asked, Clock, Hints, LeastRecentlyUsed
from fastdeploy_cache.books.run import Run, Tier
from fastdeploy_cache.books.run_notes import DEFAULT_PRIORITY

_MIN_SWEEP = 64
_SWEPT = 4  # ends that each new one looks at while a sweep goes on
_AT_ONCE = 128  # ends between two uses: about a millisecond, of very many
Level = Callable[[Run], float]
Mark = Callable[[Run, Hints, float], None]


class MostRecentlyUsed(LeastRecentlyUsed):
    """`mru`: what was used last goes first."""

    name = "mru"

    def rank(self, run: Run) -> Any:
        return -run.last_used

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return upper.last_used == lower.last_used


class FirstInFirstOut(LeastRecentlyUsed):
    """`fifo`: what was computed longest ago goes first."""

    name = "fifo"

    def rank(self, run: Run) -> Any:
        return run.inserted


class FirstInLastOut(LeastRecentlyUsed):
    """`filo`: what was computed last goes first."""

    name = "filo"

    def rank(self, run: Run) -> Any:
        return -run.inserted

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return upper.inserted == lower.inserted


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """`lfu`: what the fewest requests have used goes first, ties by `lru`. An evicted run starts at zero again."""

    name = "lfu"

    def rank(self, run: Run) -> Any:
        return run.num_uses, run.last_used

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return upper.num_uses == lower.num_uses


class SegmentedLeastRecentlyUsed(LeastRecentlyUsed):
    """`slru`: what was used once goes first, then what was used again; each by `lru`."""

    name = "slru"

    def rank(self, run: Run) -> Any:
        return run.num_uses >= 2, run.last_used

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return (upper.num_uses >= 2) == (lower.num_uses >= 2)


_End = tuple[float, int, Run]


class _ForATime(LeastRecentlyUsed):
    """Ranks by a level that a request gives to what it used, until `keep_until`; then by level 0."""

    def __init__(
        self, clock: Clock, level: Level, mark: Mark, *, keeps_borders: bool = False, num_uses: int = 0
    ) -> None:
        """`level`: of what was marked, while that lasts. `mark` notes what a request asks for, until a time."""
        super().__init__(clock, keeps_borders=keeps_borders, num_uses=num_uses)
        self._level, self._mark = level, mark
        self._ends: list[_End] = []  # when the levels of leaves end: a heap
        self._unswept: list[_End] = []  # the rest of them, while a sweep goes on: a heap, too
        self._watched: dict[Run, float] | LargeDict[Run, float] = {}  # the end that counts
        self._num_watches = 0
        self._sweep_at = _MIN_SWEEP
        self._num_to_end = _AT_ONCE

    def rank(self, run: Run) -> Any:
        # What is over counts until it is ranked anew: else thousands that end at once would stand at wrong places.
        is_marked = self._clock() < run.notes.keep_until or self._watched.get(run) is not None
        return (self._level(run) if is_marked else 0), run.last_used

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        super().use(path, request, asked)
        until = math.inf if request.keep_seconds is None else self._clock() + request.keep_seconds
        for run in path:
            self._mark(run, request, until)
        self._push_leaves(path)

    def touch(self, path: Sequence[Run]) -> None:
        self._num_to_end = _AT_ONCE
        super().touch(path)

    def push(self, run: Run, tier: Tier) -> None:
        super().push(run, tier)
        until, known = run.notes.keep_until, self._watched.get(run)
        if self._clock() < until < (math.inf if known is None else known):
            self._watched = put(self._watched, run, until, hash)
            self._num_watches += 1
            heapq.heappush(self._ends, (until, self._num_watches, run))
            if self._unswept:
                self._sweep()
            elif len(self._ends) >= self._sweep_at:
                self._ends, self._unswept = [], self._ends

    def _sweep(self) -> None:
        """Forget some runs that were evicted before their time."""
        unswept = self._unswept
        for end in unswept[: -_SWEPT - 1 : -1]:
            until, _, run = end
            if self._watched.get(run) == until:
                if run.parent is None:
                    self._watched.pop(run)
                else:
                    heapq.heappush(self._ends, end)
        del unswept[-_SWEPT:]  # of a heap without its last ones the rest is a heap
        if not unswept:
            self._sweep_at = max(_MIN_SWEEP, 2 * len(self._ends))

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        self._end_levels()
        return super().victim(tier, num_blocks)

    def coldest(self, tier: Tier) -> Generator[Run]:
        self._end_levels()
        return super().coldest(tier)

    def _end_levels(self) -> None:
        """Rank anew what was marked for a time that is over; of very many, the rest after the next uses."""
        now = self._clock()
        for ends in (self._ends, self._unswept):
            while ends and ends[0][0] <= now and self._num_to_end > 0:
                self._num_to_end -= 1
                until, _, run = heapq.heappop(ends)
                if self._watched.get(run) == until:
                    self._watched.pop(run)
                    for each in Tier:
                        if self._is_leaf(run, each):
                            self.push(run, each)  # or watched for longer

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        a, b = upper.notes, lower.notes
        return (a.priority, a.keep_until) == (b.priority, b.keep_until)


class Priority(_ForATime):
    """`priority`: the lowest `Request.priority` (0 to 100) goes first, ties by `lru`.

    A run has that of the last request which used it and gave one, for its `keep_seconds`; then, or where none was
    given, 35. This is the retention priority of TensorRT-LLM.
    """

    name = "priority"

    def __init__(self, clock: Clock, *, keeps_borders: bool = False, num_uses: int = 0) -> None:
        super().__init__(clock, _level_by_priority, _mark_priority, keeps_borders=keeps_borders, num_uses=num_uses)


class PinForATime(_ForATime):
    """`pin`: what a request pinned by `keep_seconds` goes last, until they are over; the rest by `lru`.

    Pinned blocks do go when nothing else is left: a pin must not keep an engine from serving.
    """

    name = "pin"

    def __init__(self, clock: Clock, *, keeps_borders: bool = False, num_uses: int = 0) -> None:
        super().__init__(clock, _level_of_pinned, _mark_pinned, keeps_borders=keeps_borders, num_uses=num_uses)


def _level_by_priority(run: Run) -> float:
    return run.notes.priority - DEFAULT_PRIORITY


def _mark_priority(run: Run, request: Hints, until: float) -> None:
    if request.priority is not None:
        run.notes = run.notes.but(priority=request.priority, keep_until=until)


def _level_of_pinned(_: Run) -> float:
    return 1


def _mark_pinned(run: Run, request: Hints, until: float) -> None:
    if request.keep_seconds is not None:
        run.notes = run.notes.but(keep_until=max(run.notes.keep_until, until))


RANKING_POLICIES: dict[str, type[LeastRecentlyUsed]] = {
    "lru": LeastRecentlyUsed,
    "fifo": FirstInFirstOut,
    "lfu": LeastFrequentlyUsed,
    "slru": SegmentedLeastRecentlyUsed,
    "priority": Priority,
    "pin": PinForATime,
    "mru": MostRecentlyUsed,
    "filo": FirstInLastOut,
}
