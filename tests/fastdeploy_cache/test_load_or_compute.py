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


@pytest.mark.parametrize(("seconds", "worth"), [(0.004, True), (4.0, False)])
def test_the_faster_way_is_taken(seconds: float, worth: bool) -> None:
    """Four blocks take 64 ms to compute; loading takes 4 ms, or 4 s."""
    chooser = speeds()
    chooser.cpu.note(4000, seconds)
    assert chooser.is_worth_loading(4) is worth
    chooser.storage.note(4000, seconds)
    assert chooser.is_worth_fetching(4) is worth


def test_latency_and_speed_are_told_apart() -> None:
    """A store of 30 ms a call and 1 MB/s: one block is faster computed, a hundred are faster loaded."""
    chooser = speeds()
    for num_blocks in (1, 8, 1, 8):
        chooser.storage.note(num_blocks * 1000, 0.03 + num_blocks * 1e-3)
    assert chooser.storage.seconds(100_000) == pytest.approx(0.13)
    assert not chooser.is_worth_fetching(1) and chooser.is_worth_fetching(100)


def test_lookups_and_what_is_on_its_way_count() -> None:
    """Ten blocks take 160 ms to compute and 100 ms to read: not when the look-up takes as long, nor behind others."""
    chooser = speeds()
    chooser.storage.note(10_000, 0.1)
    assert chooser.is_worth_fetching(10) and not chooser.is_worth_fetching(10, num_queued_blocks=10)
    chooser.lookup.note(1, 0.1)
    assert not chooser.is_worth_fetching(10)
    chooser.forget_storage()
    assert chooser.is_worth_fetching(10)


def test_nobody_waits_longer_than_computing_takes() -> None:
    """Where the policy decides by time; else the prefetch policy alone does."""
    assert speeds().patience_seconds(4) == pytest.approx(0.064)
    assert speeds("always").patience_seconds(4) is None and speeds(told=None).patience_seconds(4) is None


@pytest.mark.parametrize(("policy", "worth"), [("always", True), ("never", False)])
def test_it_may_be_set(policy: str, worth: bool) -> None:
    """Whatever was measured."""
    chooser = speeds(policy)
    chooser.cpu.note(4000, 100.0 if worth else 1e-6)
    assert all(chooser.is_worth_loading(4) is worth for _ in range(40))


@pytest.mark.parametrize("tier", ["cpu", "storage"])
def test_a_tier_that_was_slow_gets_another_chance(tier: str) -> None:
    """One prefix of sixteen is loaded all the same, and fast loads change the answer."""
    chooser = speeds()
    is_worth = chooser.is_worth_loading if tier == "cpu" else chooser.is_worth_fetching
    getattr(chooser, tier).note(4000, 10.0)
    assert [is_worth(4) for _ in range(32)].count(True) == 2
    for _ in range(60):
        getattr(chooser, tier).note(4000, 0.001)
    assert is_worth(4)


def test_the_prefill_speed_is_learned_unless_told() -> None:
    """From commits of enough tokens."""
    learning, told = speeds(told=None), speeds()
    for chooser in (learning, told):
        chooser.note_prefill(8, 1.0)
        chooser.note_prefill(500, 1.0)
    assert (learning.prefill.per_second, told.prefill.per_second) == (500.0, 1000.0)


def test_a_breaker_through_its_states() -> None:
    """Failures in a row open it, a success between starts anew; only a probe closes it; the pause doubles."""
    breaker = Breaker(2, 5.0)
    breaker.failed(0.0)
    breaker.succeeded()
    breaker.failed(0.0)
    assert breaker.is_closed
    breaker.failed(1.0)
    assert breaker.state is BreakerState.OPEN
    assert not breaker.is_probe_due(5.9) and breaker.is_probe_due(6.0)
    breaker.begin_probe()
    assert not breaker.is_probe_due(100.0)
    breaker.succeeded()  # both of something that had begun before
    breaker.failed(6.0)
    assert breaker.state is BreakerState.HALF_OPEN
    breaker.probe_ended(False, 6.0)
    assert not breaker.is_probe_due(15.9) and breaker.is_probe_due(16.0)
    breaker.begin_probe()
    breaker.probe_ended(None, 20.0)  # nobody has tried it: as long a pause again
    assert not breaker.is_probe_due(29.9) and breaker.is_probe_due(30.0)
    breaker.begin_probe()
    breaker.probe_ended(True, 31.0)
    assert breaker.is_closed


def test_a_probe_of_a_closed_breaker_counts_as_any_call() -> None:
    """As the first one, when a store has been attached."""
    breaker = Breaker(2, 5.0)
    breaker.probe_ended(False, 0.0)
    breaker.probe_ended(True, 0.0)
    breaker.probe_ended(False, 0.0)
    assert breaker.is_closed
    breaker.probe_ended(False, 0.0)
    assert breaker.state is BreakerState.OPEN
