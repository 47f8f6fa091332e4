"""The leaves of one tier in the order of their ranks, which change while they wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from typing import Any

from fastdeploy_cache.books.run import Run, Tier

IsLeaf = Callable[[Run, Tier], bool]
MIN_SWEEP = 64  # entries that a heap may have before it is looked through for those that stand for nothing
_NUM_SAMPLED = 64


class LeafHeap:
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
        self._sweep_at = MIN_SWEEP

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
        self._sweep_at = max(MIN_SWEEP, 2 * len(self._heap))

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
