"""Admitted requests, their tokens, and the hit rates of the last minutes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fastdeploy_cache.metrics.families import Families, Values, by_one
from fastdeploy_cache.metrics.hit_rate import HitRateWindow

if TYPE_CHECKING:
    from prometheus_client.core import Metric

TIERS = ("gpu", "cpu", "storage")
OTHERS = "others"  # the label of all namespaces behind the first few: names come from outside


class RequestCounts:
    """Sums since the start, and a sliding window. One thread at a time."""

    def __init__(self, window_seconds: float) -> None:
        self._window = HitRateWindow(window_seconds)
        self.num_requests = self._num_requests_hit = 0
        self.num_tokens = 0
        self._hit_tokens = [0] * len(TIERS)

    def record(self, now: float, num_tokens: int, hit_tokens: tuple[int, ...]) -> None:
        """A request of `num_tokens` prompt tokens was admitted; `hit_tokens` in the order of `TIERS`."""
        self.num_requests += 1
        self.num_tokens += num_tokens
        if any(hit_tokens):
            self._num_requests_hit += 1
            for tier, num in enumerate(hit_tokens):
                if num:
                    self._hit_tokens[tier] += num
        self._window.record(now, num_tokens, hit_tokens)

    @property
    def hit_tokens(self) -> tuple[int, ...]:
        """Prompt tokens that were served so far, by tier."""
        return tuple(self._hit_tokens)

    def hit_rates(self, now: float) -> dict[str, float]:
        """The hit rates over the window: `request`, `token`, and the token hit rate of each tier."""
        rates = {"request": self._window.request_hit_rate(now), "token": self._window.token_hit_rate(now)}
        return rates | {tier: self._window.token_hit_rate(now, i) for i, tier in enumerate(TIERS)}

    def known_hit_rates(self, now: float) -> Mapping[str, float | None]:
        """The same, and None for each where no request came within the window."""
        rates = self.hit_rates(now)
        return rates if self._window.has_requests(now) else dict.fromkeys(rates)

    def families(self, families: Families, now: float) -> list[Metric]:
        """What Prometheus is shown."""
        rates, hits = self.hit_rates(now), by_one(TIERS, dict(zip(TIERS, self._hit_tokens, strict=True)))
        text, num_requests_hit = "Requests that hit at least one token", self._num_requests_hit
        by_tier = "Share of tokens served by a tier, recently"
        return [
            families.counter("requests", "Requests admitted", (), {(): self.num_requests}),
            families.counter("requests_hit", text, (), {(): num_requests_hit}),
            families.counter("tokens_queried", "Prompt tokens of admitted requests", (), {(): self.num_tokens}),
            families.counter("tokens_hit", "Prompt tokens served by a tier", ("tier",), hits),
            families.gauge("window_request_hit_rate", "Share of requests hit, recently", (), {(): rates["request"]}),
            families.gauge("window_token_hit_rate", "Share of tokens hit, recently", (), {(): rates["token"]}),
            families.gauge("window_tier_token_hit_rate", by_tier, ("tier",), {(t,): rates[t] for t in TIERS}),
        ]


class NamespaceCounts:
    """Sums for each of the first `max_labels` namespaces, and for the rest together. One thread at a time."""

    def __init__(self, max_labels: int) -> None:
        self._max_labels = max_labels
        self._sums: dict[str, list[int]] = {OTHERS: [0] * (2 + len(TIERS))} if max_labels else {}

    def record(self, label: str, num_tokens: int, hit_tokens: tuple[int, ...]) -> None:
        """A request of a namespace was admitted; `hit_tokens` in the order of `TIERS`."""
        sums = self._sums.get(label)
        if sums is None:
            sums = self._sums[OTHERS]
            if len(self._sums) <= self._max_labels:
                sums = self._sums[label] = [0] * len(sums)
        for place, count in enumerate((1, num_tokens, *hit_tokens)):
            sums[place] += count

    def families(self, families: Families) -> list[Metric]:
        """What Prometheus is shown; nothing where no namespace has a label."""
        if not self._sums:
            return []
        counts = self._sums.items()
        requests: Values = {(name,): sums[0] for name, sums in counts}
        tokens: Values = {(name,): sums[1] for name, sums in counts}
        hits: Values = {(name, tier): sums[2 + place] for name, sums in counts for place, tier in enumerate(TIERS)}
        own = ("namespace",)
        return [
            families.counter("namespace_requests", "Requests admitted, by namespace", own, requests),
            families.counter("namespace_prompt_tokens", "Their prompt tokens", own, tokens),
            families.counter("namespace_hit_tokens", "Those that a tier has served", (*own, "tier"), hits),
        ]
