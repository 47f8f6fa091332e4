"""Gauges of what other sizes of the tiers would give."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LABELS = ("dp", "tier", "factor", "policy")


class WhatIfCounts(NamedTuple):
    """Tier, factor of its size, policy, hit rate of tokens, and seconds saved where the prefill speed is known; and
    requests that the estimates do not know of."""

    rates: Iterable[tuple[str, float, str, float, float | None]] = ()
    num_lost_requests: int = 0


def what_if_families(dp: str, counts: WhatIfCounts) -> Iterator[Metric]:
    """Families without a sample where nothing is estimated yet."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily  # late: a web server comes with it

    text = "Share of prompt tokens of the last hour that a tier of another size would have hit"
    hits = GaugeMetricFamily("fastdeploy_cache_what_if_hit_rate", text, labels=_LABELS)
    text = "Computing of the last hour that a tier of another size would have saved, in seconds"
    saved = GaugeMetricFamily("fastdeploy_cache_what_if_saved_seconds", text, labels=_LABELS)
    for tier, factor, policy, rate, seconds in counts.rates:
        hits.add_metric((dp, tier, f"{factor:g}", policy), rate)
        if seconds is not None:
            saved.add_metric((dp, tier, f"{factor:g}", policy), seconds)
    text = "Requests that the estimates of other sizes do not know of, as they could not follow"
    lost = CounterMetricFamily("fastdeploy_cache_what_if_lost_requests", text, labels=("dp",))
    lost.add_metric((dp,), counts.num_lost_requests)
    yield from (hits, saved, lost)
