"""Which leaf of the tree loses its tail next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from fastdeploy_cache.run import Run, Tier


class LeastRecentlyUsed:
    """Leaves of one tier by the time they were last used, oldest first.

    A leaf that is used, pinned or no longer a leaf is not searched for: its entry goes stale and is dropped when it
    comes up, or in a sweep once stale ones outnumber the rest. Both cost O(log n) amortised.
    """

    def __init__(self, tier: Tier, is_leaf: Callable[[Run, Tier], bool]) -> None:
        """`is_leaf(run, tier)` says whether a run may lose its tail in that tier now."""
        self._tier = tier
        self._is_leaf = is_leaf
        self._heap: list[tuple[int, int, Run]] = []
        self._num_pushed = 0
        self._sweep_at = 64

    def push(self, run: Run) -> None:
        """Let a leaf take part, under its present `last_used`."""
        if run.queued[self._tier] == run.last_used:
            return
        run.queued[self._tier] = run.last_used
        self._num_pushed += 1
        heapq.heappush(self._heap, (run.last_used, self._num_pushed, run))
        if len(self._heap) >= self._sweep_at:
            self._heap = [entry for entry in self._heap if self._valid(entry)]
            heapq.heapify(self._heap)
            self._sweep_at = max(64, 2 * len(self._heap))

    def oldest(self) -> Run:
        """The leaf to take from next; it stays. The caller knows that there is one."""
        while not self._valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def _valid(self, entry: tuple[int, int, Run]) -> bool:
        stamp, _, run = entry
        if run.queued[self._tier] != stamp:  # used again since, or queued anew
            return False
        if run.last_used == stamp and self._is_leaf(run, self._tier):
            return True
        run.queued[self._tier] = -1
        return False
