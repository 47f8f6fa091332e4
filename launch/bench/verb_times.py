"""How long calls take, in their thread's time, with the garbage collector's share told apart."""

from __future__ import annotations

import gc
import threading
from array import array
from time import thread_time_ns
from typing import Self

import numpy as np

_BLOCK_NANOSECONDS = 1000  # what a call may take more for each block that it takes, evicts or publishes
WORST, WORST_LESS_BLOCKS = "worst", "worst less 1 us a block"
STATISTICS = ("mean", "p99", WORST, WORST_LESS_BLOCKS)


class Times:
    """Calls of one kind: the worst of all, mean and 99th percentile of those that are kept."""

    def __init__(self) -> None:
        self._kept = array("q")
        self._worst = self._worst_less_blocks = 0

    def note(self, nanoseconds: int, num_blocks: int, is_kept: bool) -> None:
        """A call took so long, for so many blocks."""
        self._worst = max(self._worst, nanoseconds)
        self._worst_less_blocks = max(self._worst_less_blocks, nanoseconds - num_blocks * _BLOCK_NANOSECONDS)
        if is_kept:
            self._kept.append(nanoseconds)

    def found(self) -> dict[str, float]:
        """In milliseconds, by name of `STATISTICS`; nothing where no call was kept."""
        if not self._kept:
            return {}
        kept = np.frombuffer(self._kept, np.int64)
        found = kept.mean(), np.percentile(kept, 99), self._worst, self._worst_less_blocks
        return {name: float(value) / 1e6 for name, value in zip(STATISTICS, found, strict=True)}


class Collections:
    """The passes of the garbage collector. While it listens, `spent` is what all of them took."""

    def __init__(self) -> None:
        self.spent = 0
        self.times = Times()
        self._since = 0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_pass)
        return self

    def __exit__(self, *_: object) -> None:
        gc.callbacks.remove(self._on_pass)

    def _on_pass(self, phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            self._since = thread_time_ns()
        else:
            took = thread_time_ns() - self._since
            self.spent += took
            self.times.note(took, 0, True)


class Stopwatch:
    """Times calls of verbs, and how long they hold the lock. `is_kept`: whether they count beside the worst."""

    def __init__(self, collections: Collections) -> None:
        self.verbs: dict[str, Times] = {}
        self.is_kept = False
        self._collections = collections
        self._since = self._collected = 0

    def start(self) -> None:
        """A call begins."""
        self._collected = self._collections.spent
        self._since = thread_time_ns()

    def stop(self) -> int:
        """It has ended: the nanoseconds since, without collections."""
        return thread_time_ns() - self._since - (self._collections.spent - self._collected)

    def note(self, verb: str, nanoseconds: int, num_blocks: int) -> None:
        """What it was, and for how many blocks."""
        self.verbs.setdefault(verb, Times()).note(nanoseconds, num_blocks, self.is_kept)


class TimedLock:
    """A lock that keeps the longest hold since it was asked last, in nanoseconds of its holder's thread."""

    def __init__(self, collections: Collections) -> None:
        self._lock = threading.Lock()
        self._watch = Stopwatch(collections)
        self._longest = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock`."""
        is_taken = self._lock.acquire(blocking, timeout)
        self._watch.start()
        return is_taken

    def release(self) -> None:
        """See `threading.Lock`."""
        self._longest = max(self._longest, self._watch.stop())
        self._lock.release()

    def take_longest(self) -> int:
        """The longest hold since the last call of this."""
        longest, self._longest = self._longest, 0
        return longest
