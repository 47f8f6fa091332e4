"""How many blocks are evicted, how old and how long idle they are then, and after how long blocks are used again."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from fastdeploy_cache.books.run import GPU, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.metrics.histogram import AGE_SECONDS, Histogram

_EVICTED, _SPARE = Loss.CPU, Loss.SPARE  # or below the first; looking a member up takes long, and each block is told
_STAMP_SECONDS = 0.01  # what happens within so long has the same time, and the same object: a float takes 32 bytes


class Ages:
    """A tap: observed for each run and request. A request pays a microsecond for all that is measured. Under the lock.

    Attributes:
        num_evicted: by Tier, blocks since the start, [those with a copy in the other tier, those without].
        residency: by Tier, seconds that evicted blocks had been there: since their run had its first blocks there.
        idle: by Tier, seconds since evicted blocks were last used. A use is counted when its request ends.
        reuse_gaps: seconds since the last run that a request hit was last used. What lies above was used since then.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.residency, self.idle = ([Histogram(AGE_SECONDS) for _ in TIERS] for _ in range(2))
        self.reuse_gaps = Histogram(AGE_SECONDS)
        self.num_evicted = ([0, 0], [0, 0])
        self._clock, self._stamp = clock, 0.0
        self._going: Run | None = None  # of the run that was evicted from last: most are evicted in many steps
        self._going_from = GPU
        self._num_gone, self._age, self._idle = 0, 0.0, 0.0

    def began(self, run: Run, tier: Tier, _first: int, _num_blocks: int) -> None:
        """See `Taps`."""
        clock = self._clock
        now = clock()
        if now - self._stamp < _STAMP_SECONDS:
            now = self._stamp
        self._stamp = now
        if tier:
            run.cpu_since = now
        else:
            run.gpu_since = now

    def left(self, run: Run, tier: Tier, first: int, num_blocks: int, why: Loss) -> None:
        """See `Taps`. What is evicted is gathered as long as it is of one run; `count_evicted` counts it."""
        if why > _EVICTED and why is not _SPARE:
            return
        num_kept = 0
        if run is self._going and tier is self._going_from:
            self._num_gone += num_blocks
        else:
            self.count_evicted()
            now, since = self._clock(), run.cpu_since if tier else run.gpu_since
            self._going, self._going_from, self._num_gone = run, tier, num_blocks
            self._age, self._idle = now - since, now - (run.used_last or since)
        if tier:
            if why:  # else its copies go with it
                num_kept = max(0, min(run.num_gpu, first + num_blocks) - first)
        elif run.cpu and run.cpu_start <= first:
            num_kept = max(0, min(run.cpu_end, first + num_blocks) - first)
        evicted = self.num_evicted[tier]
        if num_kept:
            evicted[0] += num_kept
        evicted[1] += num_blocks - num_kept

    def evicted_together(self, tier: Tier, gone: Sequence[Run]) -> None:
        """The same for runs that leave a tier whole and are in no other, in one eviction."""
        now = self._clock()
        with contextlib.suppress(MemoryError):  # as above
            num_blocks = [run.num_blocks for run in gone]
            since = [run.cpu_since if tier else run.gpu_since for run in gone]
            self.residency[tier].add_all([now - at for at in since], num_blocks)
            idle = [now - (run.used_last or at) for run, at in zip(gone, since, strict=True)]
            self.idle[tier].add_all(idle, num_blocks)
            self.num_evicted[tier][1] += sum(num_blocks)

    def count_evicted(self) -> None:
        """Count what has gone of the run that was evicted from last; before anybody reads."""
        if self._going is not None:
            self._going = None
            try:
                self.residency[self._going_from].add(self._age, self._num_gone)
                self.idle[self._going_from].add(self._idle, self._num_gone)
            except MemoryError:  # these are not counted, and whatever they are part of goes on
                self.num_evicted[self._going_from][1] -= self._num_gone

    def used(self, path: Sequence[Run]) -> None:
        """A request ends that used these runs."""
        clock = self._clock
        now = clock()
        if now - self._stamp < _STAMP_SECONDS:
            now = self._stamp
        self._stamp = now
        for run in path:
            run.used_last = now

    def hit(self, run: Run, matched_at: float | None = None) -> None:
        """A request ends that was matched at this time, or just now, and whose hit ended in this run. Before `used`."""
        if last := run.used_last:
            self.reuse_gaps.add((self._clock() if matched_at is None else matched_at) - last)
