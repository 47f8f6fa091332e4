"""A histogram of plain numbers; it becomes one of Prometheus' at scrape time."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

CALL_SECONDS = (1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.5)
TASK_SECONDS = (1e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
AGE_SECONDS = (0.1, 1.0, 5.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0, 10800.0, 43200.0, 86400.0)

_FEW = 32  # values that are added one by one in no more time than NumPy takes


class Counted(NamedTuple):
    """A histogram as it was at one moment: how many values each bucket has, the last one without a bound."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float


class Histogram:
    """Counts values in buckets, each with its weight. One thread at a time adds; any may read.

    Attributes:
        bounds: the highest value of each bucket, rising.
        counts: values by bucket. Those above the last bound have a bucket of their own.
        total: the sum of all values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        """Empty buckets."""
        self.bounds, self.counts, self.total = bounds, [0] * (len(bounds) + 1), 0.0

    def add(self, value: float, weight: int = 1) -> None:
        """Count a value, as often as `weight` says."""
        self.counts[bisect_left(self.bounds, value)] += weight
        self.total += value * weight

    def add_all(self, values: Sequence[float], weights: Sequence[int]) -> None:
        """Count these, each as often as its weight says."""
        if len(values) < _FEW:
            for value, weight in zip(values, weights, strict=True):
                self.add(value, weight)
            return
        found, num = np.asarray(values), np.asarray(weights)
        by_bucket = np.bincount(np.searchsorted(self.bounds, found), num, len(self.counts))
        self.counts = (by_bucket.astype(np.int64) + self.counts).tolist()
        self.total += float(found @ num)

    def read(self) -> Counted:
        """What has been counted so far."""
        return Counted(self.bounds, tuple(self.counts), self.total)
