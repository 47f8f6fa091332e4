"""Load or compute again: by what both were seen to take."""

from __future__ import annotations

import pytest

from fastdeploy_cache.policies.breaker import Breaker, BreakerState
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute


def speeds(policy: str = "auto", told: float | None = 1000.0) -> LoadOrCompute:
    """Blocks of 16 tokens and 1000 bytes."""
    return LoadOrCompute(policy, told, 1000, 16)


def test_what_is_not_known_is_loaded() -> None:
    """The first load finds out how fast the tier is."""
    assert speeds().is_worth_loading(4) and speeds().is_worth_fetching(4)
    assert speeds(told=None).is_worth_loading(4)


@pytest.mark.parametrize(("bytes_per_second", "worth"), [(1e6, True), (1e3, False)])
def test_the_faster_way_is_taken(bytes_per_second: float, worth: bool) -> None:
    """Four blocks take 64 ms to compute; loading takes 4 ms, or 4 s."""
    chooser = speeds()
    chooser.cpu.note(bytes_per_second, 1.0)
    assert chooser.is_worth_loading(4) is worth
    chooser.storage.note(bytes_per_second, 1.0)
    assert chooser.is_worth_fetching(4) is worth


@pytest.mark.parametrize(("policy", "worth"), [("always", True), ("never", False)])
def test_it_may_be_set(policy: str, worth: bool) -> None:
    """Whatever was measured."""
    chooser = speeds(policy)
    chooser.cpu.note(1.0 if worth else 1e12, 1.0)
    assert all(chooser.is_worth_loading(4) is worth for _ in range(40))


def test_a_tier_that_was_slow_gets_another_chance() -> None:
    """One prefix of sixteen is loaded all the same, and a fast load changes the answer."""
    chooser = speeds()
    chooser.cpu.note(10.0, 1.0)
    assert [chooser.is_worth_loading(4) for _ in range(32)].count(True) == 2
    for _ in range(60):
        chooser.cpu.note(1e9, 1.0)
    assert chooser.is_worth_loading(4)


def test_the_prefill_speed_is_learned_unless_told() -> None:
    """From commits of enough tokens."""
    learning, told = speeds(told=None), speeds()
    for chooser in (learning, told):
        chooser.note_prefill(8, 1.0)
        chooser.note_prefill(500, 1.0)
    assert (learning.prefill.per_second, told.prefill.per_second) == (500.0, 1000.0)


def test_a_breaker_through_its_states() -> None:
    """Failures in a row open it, a success between starts anew; one probe at a time; the pause doubles."""
    breaker = Breaker(2, 5.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert breaker.is_closed
    breaker.failed(1.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.is_probe_due(5.9) and breaker.is_probe_due(6.0)
    breaker.succeeded()  # of something that had begun before
    assert breaker.state is BreakerState.OPEN
    breaker.begin_probe()
    assert not breaker.is_probe_due(100.0)
    breaker.failed(6.0)
    assert not breaker.is_probe_due(15.9) and breaker.is_probe_due(16.0)
    breaker.begin_probe()
    breaker.succeeded()
    assert breaker.is_closed
