"""Hit rates over a sliding window. Pure: the clock is an argument."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

_NUM_SLICES = 60


@dataclass
class _Slice:
    number: int
    num_requests: int = 0
    num_requests_hit: int = 0
    num_tokens: int = 0
    hit_tokens: list[int] = field(default_factory=list)


class HitRateWindow:
    """Requests of the last `window_seconds`, summed in 60 slices: old ones leave a slice at a time, without a jump.

    Rates are fractions in 0..1; 0 where nothing was asked. One thread at a time.
    """

    def __init__(self, window_seconds: float) -> None:
        self._slice_seconds = window_seconds / _NUM_SLICES
        self._slices: deque[_Slice] = deque()

    def record(self, now: float, num_tokens: int, hit_tokens: tuple[int, ...]) -> None:
        """One request of `num_tokens`, of which `hit_tokens[tier]` came from each tier, at time `now`."""
        number = int(now / self._slice_seconds)
        if not self._slices or self._slices[-1].number != number:
            self._slices.append(_Slice(number, hit_tokens=[0] * len(hit_tokens)))
            self._expire(now)
        current = self._slices[-1]
        current.num_requests += 1
        current.num_tokens += num_tokens
        if any(hit_tokens):
            current.num_requests_hit += 1
            for tier, num in enumerate(hit_tokens):
                if num:
                    current.hit_tokens[tier] += num

    def has_requests(self, now: float) -> bool:
        """Whether one came in that time."""
        self._expire(now)
        return bool(self._slices)

    def request_hit_rate(self, now: float) -> float:
        """Share of requests that hit at least one token."""
        self._expire(now)
        return _ratio(sum(s.num_requests_hit for s in self._slices), sum(s.num_requests for s in self._slices))

    def token_hit_rate(self, now: float, tier: int | None = None) -> float:
        """Share of tokens that came from a tier, by its place in `hit_tokens`, or from any."""
        self._expire(now)
        hit = sum(sum(s.hit_tokens) if tier is None else s.hit_tokens[tier] for s in self._slices)
        return _ratio(hit, sum(s.num_tokens for s in self._slices))

    def _expire(self, now: float) -> None:
        oldest = int(now / self._slice_seconds) - _NUM_SLICES
        while self._slices and self._slices[0].number <= oldest:
            self._slices.popleft()


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
