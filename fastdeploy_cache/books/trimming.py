"""No dead KV: full KV behind the last checkpoint of a leaf serves nobody, and is freed. Under the lock."""

from __future__ import annotations

import contextlib

from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.taps import Loss

A_TURN = 64  # runs that one call removes: some hundred microseconds


class Trimmer:
    """After each verb a leaf ends at its last checkpoint, or where it is held. What ends a path that is very long is
    removed in pieces: the rest waits for the next turns, and for whoever needs its blocks."""

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self.waiting: dict[Run, Loss] = {}  # leaves with dead KV, and why there is no checkpoint behind it
        residency.trim = self.trim
        residency.taps.joined += (self._joined,)

    def trim(self, run: Run, why: Loss, at_most: int = A_TURN) -> None:
        """Cut a run, if it is a leaf, back to where somebody can use it, and so on upwards where it goes whole. What
        gets no memory waits."""
        with contextlib.suppress(MemoryError):
            self._cut(run, why, at_most)

    def go_on(self) -> bool:
        """Remove some of what waits; whether there was anything. Raises `MemoryError`, after which it waits on."""
        if not self.waiting:
            return False
        run = next(reversed(self.waiting))
        self._cut(run, self.waiting[run], A_TURN)
        self.waiting.pop(run, None)
        return True

    def _cut(self, run: Run, why: Loss, at_most: int) -> None:
        residency = self._residency
        while run.parent is not None and not run.children and run.epoch == residency.epoch:
            checkpoint, end = run.checkpoint, run.num_held
            if checkpoint is not None and checkpoint.end > end:
                end = checkpoint.end
            if end == run.num_blocks:
                break
            if at_most <= 0:
                self._wait(run, why)
                break
            at_most -= 1
            above = run.parent
            try:
                residency.truncate(run, end, why)
            except MemoryError:
                self._wait(run, why)
                raise
            run = above

    def _wait(self, run: Run, why: Loss) -> None:
        with contextlib.suppress(MemoryError):  # it is evicted as any other leaf then
            self.waiting[run] = why

    def _joined(self, upper: Run, lower: Run) -> None:
        if lower in self.waiting:
            self._wait(upper, self.waiting.pop(lower))
