"""Gauges of what other sizes of the tiers would give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from fastdeploy_cache.metrics.families import Families

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_LABELS = ("tier", "factor", "policy")


class WhatIfCounts(NamedTuple):
    """Tier, factor of its size, policy, hit rate of tokens, and seconds saved where the prefill speed is known; and
    requests that the estimates do not know of."""

    rates: Iterable[tuple[str, float, str, float, float | None]] = ()
    num_lost_requests: int = 0


def what_if_families(counts: WhatIfCounts, families: Families) -> list[Metric]:
    """Families without a sample where nothing is estimated yet."""
    hits: dict[tuple[str, ...], float] = {}
    saved: dict[tuple[str, ...], float] = {}
    for tier, factor, policy, rate, seconds in counts.rates:
        hits[tier, f"{factor:g}", policy] = rate
        if seconds is not None:
            saved[tier, f"{factor:g}", policy] = seconds
    by_hits = "Share of prompt tokens of the last hour that a tier of another size would have hit"
    by_saved = "Computing of the last hour that a tier of another size would have saved, in seconds"
    lost = "Requests that the estimates of other sizes do not know of, as they could not follow"
    return [
        families.gauge("what_if_hit_rate", by_hits, _LABELS, hits),
        families.gauge("what_if_saved_seconds", by_saved, _LABELS, saved),
        families.counter("what_if_lost_requests", lost, (), {(): counts.num_lost_requests}),
    ]
