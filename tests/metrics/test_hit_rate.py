"""Hit rates over a sliding window."""

from __future__ import annotations

import itertools

import pytest

from fastdeploy_cache.metrics.hit_rate import HitRateWindow


def test_nothing_asked_is_zero() -> None:
    """No requests, or none any more, are a rate of 0.0 and not an error."""
    window = HitRateWindow(60.0)
    assert window.request_hit_rate(0.0) == window.token_hit_rate(0.0) == window.token_hit_rate(0.0, 0) == 0.0
    window.record(0.0, 10, (10, 0, 0))
    assert window.token_hit_rate(1000.0) == 0.0
    window.record(1000.0, 0, (0, 0, 0))
    assert window.token_hit_rate(1000.0) == 0.0


def test_rates_by_request_by_token_and_by_tier() -> None:
    """Requests count as hit with any tier's token; token rates add up over the tiers."""
    window = HitRateWindow(60.0)
    window.record(1.0, 100, (30, 20, 0))
    window.record(2.0, 100, (0, 0, 0))
    window.record(3.0, 200, (0, 10, 0))
    assert window.request_hit_rate(4.0) == pytest.approx(2 / 3)
    assert window.token_hit_rate(4.0) == pytest.approx(60 / 400)
    assert window.token_hit_rate(4.0, 0) == pytest.approx(30 / 400)
    assert window.token_hit_rate(4.0, 1) == pytest.approx(30 / 400)
    assert window.token_hit_rate(4.0, 2) == 0.0


def test_the_window_forgets_exactly_its_length() -> None:
    """A request counts until the window's length has passed (a slice less at most), and not after."""
    window = HitRateWindow(60.0)
    window.record(0.0, 1, (1, 0, 0))
    assert window.request_hit_rate(59.0) == 1.0
    assert window.request_hit_rate(60.0) == 0.0


def test_the_window_slides_without_a_jump() -> None:
    """Hits fade from the rate a slice at a time as misses take their place; it never falls by more than that."""
    window = HitRateWindow(60.0)
    for second in range(60):
        window.record(second + 0.5, 10, (10, 0, 0))
    rates = [window.token_hit_rate(59.9)]
    for second in range(60, 120):
        window.record(second + 0.5, 10, (0, 0, 0))
        rates.append(window.token_hit_rate(second + 0.6))
    assert rates[0] == 1.0 and rates[-1] == 0.0
    steps = [before - after for before, after in itertools.pairwise(rates)]
    assert all(0 < step <= 1 / 60 + 1e-9 for step in steps)


def test_memory_is_bounded() -> None:
    """However many requests come, the window holds sixty sums."""
    window = HitRateWindow(6.0)
    for tenth in range(1000):
        window.record(tenth / 100, 1, (1, 0, 0))
    assert len(window._slices) <= 60
