"""How old blocks are when they are evicted, how long they lay idle, and after how long they are used again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from fastdeploy_cache.books.run import GPU, TIERS, Run, Tier, Usage
from fastdeploy_cache.metrics.histogram import AGE_SECONDS, Histogram


class Ages:
    """Observed for each run and request: a request pays a microsecond for all that is measured. Under the lock.

    Attributes:
        residency: by Tier, seconds that evicted blocks had been there: since their run had its first blocks there.
        idle: by Tier, seconds since evicted blocks were last used. A use is counted when its request ends.
        reuse_gaps: seconds since the last run that a request hit was last used. What lies above was used since then.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.residency, self.idle = ([Histogram(AGE_SECONDS) for _ in TIERS] for _ in range(2))
        self.reuse_gaps = Histogram(AGE_SECONDS)
        self._clock = clock
        self._going: Usage | None = None  # of the run that was evicted from last: most are evicted in many steps
        self._going_from = GPU
        self._num_gone, self._age, self._idle = 0, 0.0, 0.0

    def came(self, run: Run, tier: Tier) -> None:
        """A run has its first blocks in a tier."""
        if tier:
            run.usage.cpu_since = self._clock()
        else:
            run.usage.gpu_since = self._clock()

    def evicted(self, run: Run, tier: Tier, num_blocks: int) -> None:
        """So many blocks of a run leave a tier to make room. `count_evicted` counts them."""
        usage = run.usage
        if usage is self._going and tier is self._going_from:
            self._num_gone += num_blocks
            return
        self.count_evicted()
        now, since = self._clock(), usage.cpu_since if tier else usage.gpu_since
        self._going, self._going_from, self._num_gone = usage, tier, num_blocks
        self._age, self._idle = now - since, now - (usage.used_last or since)

    def evicted_together(self, gone: Sequence[tuple[Usage, int]]) -> None:
        """The same for runs that leave the GPU whole, each with its blocks, in one eviction."""
        now, residency, idle = self._clock(), self.residency[GPU], self.idle[GPU]
        for usage, num_blocks in gone:
            since = usage.gpu_since
            residency.add(now - since, num_blocks)
            idle.add(now - (usage.used_last or since), num_blocks)

    def count_evicted(self) -> None:
        """Count what has gone of the run that was evicted from last; before anybody reads."""
        if self._going is not None:
            self.residency[self._going_from].add(self._age, self._num_gone)
            self.idle[self._going_from].add(self._idle, self._num_gone)
            self._going = None

    def used(self, path: Sequence[Run]) -> None:
        """A request ends that used these runs."""
        now = self._clock()
        for run in path:
            run.usage.used_last = now

    def hit(self, run: Run, matched_at: float | None = None) -> None:
        """A request ends that was matched at this time, or just now, and whose hit ended in this run. Before `used`."""
        if last := run.usage.used_last:
            self.reuse_gaps.add((self._clock() if matched_at is None else matched_at) - last)
