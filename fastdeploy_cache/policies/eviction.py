"""Which leaf of the tree loses its tail next: the interface, and the policies that rank leaves."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple, Protocol

from fastdeploy_cache.books.run import DEFAULT_PRIORITY, Run, Tier, Usage
from fastdeploy_cache.request import Request

IsLeaf = Callable[[Run, Tier], bool]
Split = Callable[[Run, int], Run]
Clock = Callable[[], float]
_MIN_SWEEP = 64
_NUM_SAMPLED = 64


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

    def use(self, path: Sequence[Run], request: Request, asked: Asked) -> None:
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


class _LeafHeap:
    """Leaves of one tier by rank, lowest first; O(log n).

    A leaf has one entry. When its rank has risen, the entry is put right as it comes up; when it has fallen, `push`
    adds a second and the first goes stale. Entries of runs that are no leaves any more are dropped as they come up, or
    in a sweep once the heap has doubled.
    """

    def __init__(self, tier: Tier, rank: Callable[[Run], Any], is_leaf: IsLeaf) -> None:
        self._tier = tier
        self._rank = rank
        self._is_leaf = is_leaf
        self._heap: list[tuple[Any, int, Run]] = []
        self._num_pushed = 0
        self._sweep_at = _MIN_SWEEP

    def push(self, run: Run) -> None:
        rank, queued = self._rank(run), run.queued[self._tier]
        self.mend_first()
        if queued is not None and queued <= rank:
            return
        run.queued[self._tier] = rank
        self._num_pushed += 1
        heapq.heappush(self._heap, (rank, self._num_pushed, run))
        if len(self._heap) >= self._sweep_at:
            self._sweep()

    def _sweep(self) -> None:
        """Drop entries that stand for nothing, where a sample says that they are many: a sweep looks at all."""
        step = max(1, len(self._heap) // _NUM_SAMPLED)
        sample = self._heap[::step]
        if 2 * sum([self._stands(entry) for entry in sample]) < len(sample):
            tier = self._tier
            kept = [entry for entry in self._heap if self._stands(entry)]
            for queued, _, run in self._heap:
                if run.queued[tier] == queued:
                    run.queued[tier] = None
            for rank, _, run in kept:
                run.queued[tier] = rank
            heapq.heapify(kept)
            self._heap = kept
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._heap))

    def mend_first(self) -> None:
        """Put an outdated entry at the top right: each push or touch leaves one, and no eviction shall pay for all."""
        if not self._heap:
            return
        queued, _, run = self._heap[0]
        if run.queued[self._tier] != queued:
            heapq.heappop(self._heap)
        elif not self._is_leaf(run, self._tier):
            run.queued[self._tier] = None
            heapq.heappop(self._heap)
        elif (rank := self._rank(run)) != queued:
            run.queued[self._tier] = rank
            self._num_pushed += 1
            heapq.heapreplace(self._heap, (rank, self._num_pushed, run))

    def first(self) -> Run:
        tier, is_leaf, heap = self._tier, self._is_leaf, self._heap
        while True:
            queued, _, run = heap[0]
            if run.queued[tier] == queued:
                if is_leaf(run, tier):
                    rank = self._rank(run)
                    if rank == queued:
                        return run
                    run.queued[tier] = rank
                    self._num_pushed += 1
                    heapq.heapreplace(heap, (rank, self._num_pushed, run))
                    continue
                run.queued[tier] = None
            heapq.heappop(heap)

    def walk(self) -> Generator[Run]:
        """Leaves in rank order; the heap is as before when the iterator is closed. Costs what taking them would."""
        taken: list[tuple[Any, int, Run]] = []
        try:
            while self._heap:
                queued, _, run = entry = heapq.heappop(self._heap)
                if run.queued[self._tier] != queued:
                    continue
                if not self._is_leaf(run, self._tier):
                    run.queued[self._tier] = None
                    continue
                rank = self._rank(run)
                if rank > queued:  # it has risen: its turn is later
                    run.queued[self._tier] = rank
                    self._num_pushed += 1
                    heapq.heappush(self._heap, (rank, self._num_pushed, run))
                    continue
                taken.append(entry)
                yield run
        finally:
            for entry in taken:
                heapq.heappush(self._heap, entry)

    def _stands(self, entry: tuple[Any, int, Run]) -> bool:
        rank, _, run = entry
        return bool(run.queued[self._tier] == rank) and self._is_leaf(run, self._tier)


class LeastRecentlyUsed:
    """`lru`: what was used longest ago goes first. The other ranking policies differ in `rank`, and in what of it may
    become one run without loss."""

    def __init__(self, clock: Clock, *, keeps_borders: bool = False, num_uses: int = 0) -> None:
        """`keeps_borders`: a run ends where an insert has ended. It is never extended in place, nor joined with the run
        behind it: else what several calls have inserted would be one run, and whole runs could not go one by one.
        `num_uses`: of another policy, which this one goes on from."""
        self._clock = clock
        self.keeps_borders = keeps_borders
        self._num_uses = num_uses
        self._heaps: tuple[_LeafHeap, ...] = ()

    def rank(self, run: Run) -> Any:
        """Lowest goes first."""
        return run.usage.last_used

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:  # noqa: ARG002
        self._heaps = tuple(_LeafHeap(tier, self.rank, is_leaf) for tier in Tier)

    def use(self, path: Sequence[Run], request: Request, asked: Asked) -> None:  # noqa: ARG002
        self.touch(path)
        for run in path:
            run.usage.num_uses += 1

    def touch(self, path: Sequence[Run]) -> None:
        self._num_uses += 1
        for run in path:
            run.usage.last_used = self._num_uses
        for heap in self._heaps:
            heap.mend_first()  # a leaf of the path has an outdated entry now

    def grow(self, run: Run, first_block: int) -> None:  # noqa: ARG002
        if self.keeps_borders:
            run.usage.is_shared = True  # what comes next becomes a run of its own

    def shrink(self, run: Run, first_block: int) -> None:
        pass

    def push(self, run: Run, tier: Tier) -> None:
        self._heaps[tier].push(run)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        return self._heaps[tier].first(), num_blocks

    def coldest(self, tier: Tier) -> Generator[Run]:
        return self._heaps[tier].walk()

    def is_colder(self, run: Run, than: Run) -> bool:
        return bool(self.rank(run) < self.rank(than))

    def alike(self, upper: Run, lower: Run) -> bool:
        return not self.keeps_borders and self.are_ranked_alike(upper, lower)

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:  # noqa: ARG002
        """Whether their ranks order them among the others as one run's would."""
        return True


class MostRecentlyUsed(LeastRecentlyUsed):
    """`mru`: what was used last goes first."""

    def rank(self, run: Run) -> Any:
        return -run.usage.last_used

    def touch(self, path: Sequence[Run]) -> None:
        super().touch(path)
        for run in path:
            for tier in Tier:
                if self._is_leaf(run, tier):  # a use makes its rank fall, which the heap has to hear
                    self.push(run, tier)

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        super().clear(is_leaf, split)
        self._is_leaf = is_leaf

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return upper.usage.last_used == lower.usage.last_used


class FirstInFirstOut(LeastRecentlyUsed):
    """`fifo`: what was computed longest ago goes first."""

    def rank(self, run: Run) -> Any:
        return run.usage.inserted


class FirstInLastOut(LeastRecentlyUsed):
    """`filo`: what was computed last goes first."""

    def rank(self, run: Run) -> Any:
        return -run.usage.inserted

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return upper.usage.inserted == lower.usage.inserted


class LeastFrequentlyUsed(LeastRecentlyUsed):
    """`lfu`: what the fewest requests have used goes first, ties by `lru`. An evicted run starts at zero again."""

    def rank(self, run: Run) -> Any:
        return run.usage.num_uses, run.usage.last_used

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return upper.usage.num_uses == lower.usage.num_uses


class SegmentedLeastRecentlyUsed(LeastRecentlyUsed):
    """`slru`: what was used once goes first, then what was used again; each by `lru`."""

    def rank(self, run: Run) -> Any:
        return run.usage.num_uses >= 2, run.usage.last_used

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        return (upper.usage.num_uses >= 2) == (lower.usage.num_uses >= 2)


class _ForATime(LeastRecentlyUsed):
    """Ranks by a level that a request gives to what it used, until `usage.keep_until`; then by level 0."""

    def clear(self, is_leaf: IsLeaf, split: Split) -> None:
        super().clear(is_leaf, split)
        self._is_leaf = is_leaf
        self._ends: list[tuple[float, int, Run]] = []  # when the levels of leaves end
        self._watched: dict[Run, float] = {}  # the end that counts
        self._num_watches = 0
        self._sweep_at = _MIN_SWEEP

    def level(self, usage: Usage) -> float:
        """The level while it lasts."""
        raise NotImplementedError

    def mark(self, usage: Usage, request: Request, until: float) -> None:
        """Note what the request asks for."""
        raise NotImplementedError

    def rank(self, run: Run) -> Any:
        usage = run.usage
        return (self.level(usage) if self._clock() < usage.keep_until else 0), usage.last_used

    def use(self, path: Sequence[Run], request: Request, asked: Asked) -> None:
        super().use(path, request, asked)
        until = math.inf if request.keep_seconds is None else self._clock() + request.keep_seconds
        for run in path:
            self.mark(run.usage, request, until)
            for tier in Tier:
                if self._is_leaf(run, tier):  # behind a pin; its rank may have fallen
                    self.push(run, tier)

    def push(self, run: Run, tier: Tier) -> None:
        super().push(run, tier)
        until = run.usage.keep_until
        if self._clock() < until < self._watched.get(run, math.inf):
            self._watched[run] = until
            self._num_watches += 1
            heapq.heappush(self._ends, (until, self._num_watches, run))
            if len(self._ends) >= self._sweep_at:
                self._sweep()

    def _sweep(self) -> None:
        """Forget runs that were evicted before their time."""
        self._watched = {run: until for run, until in self._watched.items() if run.parent is not None}
        self._ends = [end for end in self._ends if self._watched.get(end[2]) == end[0]]
        heapq.heapify(self._ends)
        self._sweep_at = max(_MIN_SWEEP, 2 * len(self._ends))

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        now = self._clock()
        while self._ends and self._ends[0][0] <= now:
            until, _, run = heapq.heappop(self._ends)
            if self._watched.get(run) == until:
                del self._watched[run]
                for each in Tier:
                    if self._is_leaf(run, each):
                        self.push(run, each)  # ranked anew, or watched for longer
        return super().victim(tier, num_blocks)

    def are_ranked_alike(self, upper: Run, lower: Run) -> bool:
        a, b = upper.usage, lower.usage
        return (a.priority, a.keep_until) == (b.priority, b.keep_until)


class Priority(_ForATime):
    """`priority`: the lowest `Request.priority` (0 to 100) goes first, ties by `lru`.

    A run has that of the last request which used it and gave one, for its `keep_seconds`; then, or where none was
    given, 35. This is the retention priority of TensorRT-LLM.
    """

    def level(self, usage: Usage) -> float:
        return usage.priority - DEFAULT_PRIORITY

    def mark(self, usage: Usage, request: Request, until: float) -> None:
        if request.priority is not None:
            usage.priority, usage.keep_until = request.priority, until


class PinForATime(_ForATime):
    """`pin`: what a request pinned by `keep_seconds` goes last, until they are over; the rest by `lru`.

    Pinned blocks do go when nothing else is left: a pin must not keep an engine from serving.
    """

    def level(self, usage: Usage) -> int:  # noqa: ARG002
        return 1

    def mark(self, usage: Usage, request: Request, until: float) -> None:
        if request.keep_seconds is not None:
            usage.keep_until = max(usage.keep_until, until)


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
