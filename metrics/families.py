"""How plain numbers become Prometheus' objects: at scrape time, with this cache's prefix and label."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from fastdeploy_cache.metrics.histogram import Counted

if TYPE_CHECKING:
    from prometheus_client.core import Metric

PREFIX = "fastdeploy_cache_"
Values = Mapping[tuple[str, ...], float]


class Families:
    """Makes families whose series all have the label `dp` in front of their own. Any thread."""

    def __init__(self, data_parallel_id: int) -> None:
        self._dp = str(data_parallel_id)

    def counter(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """A counter, to whose name `_total` is added, with a value for each of the labels' values."""
        from prometheus_client.core import CounterMetricFamily  # late: a web server comes with it

        family = CounterMetricFamily(PREFIX + name, text, labels=("dp", *labels))
        for key, value in values.items():
            family.add_metric((self._dp, *key), value)
        return family

    def gauge(self, name: str, text: str, labels: tuple[str, ...], values: Values) -> Metric:
        """A gauge, with a value for each of the labels' values."""
        from prometheus_client.core import GaugeMetricFamily

        family = GaugeMetricFamily(PREFIX + name, text, labels=("dp", *labels))
        for key, value in values.items():
            family.add_metric((self._dp, *key), float(value))
        return family

    def histogram(
        self, name: str, text: str, labels: tuple[str, ...], values: Mapping[tuple[str, ...], Counted]
    ) -> Metric:
        """A histogram for each of the labels' values."""
        from prometheus_client.core import HistogramMetricFamily

        family = HistogramMetricFamily(PREFIX + name, text, labels=("dp", *labels))
        for key, counted in values.items():
            names = [*(f"{bound:g}" for bound in counted.bounds), "+Inf"]
            sums = accumulate(counted.counts)
            family.add_metric((self._dp, *key), list(zip(names, sums, strict=True)), counted.total)
        return family


def by_one(names: Iterable[str], values: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    """Values of one label, which are zero where nothing was counted."""
    return {(name,): values.get(name, 0) for name in names}
