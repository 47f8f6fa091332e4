"""What the cache did in the last hour, in steps of some seconds."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fastdeploy_cache.ipc.clock import Clock

STEP_SECONDS = 10.0
_NUM_STEPS = 360  # an hour


class Moment(NamedTuple):
    """Counts since the start, as they were at one moment; `at` in seconds since 1970."""

    at: float
    num_requests: int
    num_tokens: int  # of prompts
    hit_tokens: Sequence[int]  # by tier
    missed_tokens: Sequence[int]  # by cause
    saved_seconds: Sequence[float]  # by tier
    move_seconds: Sequence[float]  # by tier
    evicted_blocks: Sequence[int]  # by tier
    used_blocks: Sequence[int]  # by tier; neither free nor evictable: now, not since the start
    cached_blocks: Sequence[int]  # by tier; now
    moved_bytes: Mapping[str, int]  # by kind of task


class History:
    """A ring of moments. A thread of its own adds one every ten seconds, from `start` to `stop`; any thread reads."""

    def __init__(self, look: Callable[[], Moment], clock: Clock) -> None:
        """`look` tells the present moment."""
        self._look, self._now = look, clock.now
        self._moments: deque[Moment] = deque(maxlen=_NUM_STEPS)
        self._ended = clock.event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin, unless it has begun."""
        if self._thread is None:
            self._moments.append(self._look())
            self._thread = threading.Thread(target=self._keep, name="cache-history", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread. Safe to call twice."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def moments(self) -> list[Moment]:
        """What is kept, from the oldest to now."""
        return [*self._moments, self._look()]

    def _keep(self) -> None:
        due = self._now() + STEP_SECONDS
        while not self._ended.wait(max(0.0, due - self._now())):
            due += STEP_SECONDS
            self._moments.append(self._look())
