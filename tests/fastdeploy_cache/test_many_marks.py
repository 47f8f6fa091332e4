"""Very many blocks that requests marked for a time: what ends and what is forgotten goes in pieces."""

from __future__ import annotations

import pytest

from fastdeploy_cache.policies.eviction import _AT_ONCE, _ForATime
from tests.rigs.policy_cache import Cache

NUM_PROMPTS = 3 * _AT_ONCE
POLICIES = pytest.mark.parametrize("policy", ["priority", "pin"])


def name(number: int) -> str:
    return chr(1000 + number)


def policy_of(cache: Cache) -> _ForATime:
    chosen = cache.manager._books.tree.policy.chosen
    assert isinstance(chosen, _ForATime)
    return chosen


@POLICIES
def test_marks_that_end_together_are_worked_off_with_each_use(policy: str) -> None:
    """No request pays for all of them, and after some requests what was used longest ago goes first again."""
    cache = Cache(policy, NUM_PROMPTS + 2)
    for number in range(NUM_PROMPTS):
        cache.serve(name(number), 1, priority=90, keep_seconds=10)
    assert len(policy_of(cache)._watched) == NUM_PROMPTS
    cache.now = 11.0
    num_left = NUM_PROMPTS
    for number in range(8):
        cache.serve("ABCDEFGH"[number], 1)
        before, num_left = num_left, len(policy_of(cache)._watched)
        assert before - num_left <= _AT_ONCE
    assert not num_left
    first = [number for number in range(20) if cache.cached(name(number), 1)[name(number)]]
    cache.serve("I", 1)
    assert [number for number in range(20) if cache.cached(name(number), 1)[name(number)]] == first[1:]
    cache.manager.check_invariants()


@POLICIES
def test_what_was_evicted_before_its_time_is_forgotten(policy: str) -> None:
    """However many marked prompts come and go, about as many are watched as are cached, and those end in time."""
    cache = Cache(policy, 100)
    for number in range(4000):
        cache.serve(name(number), 1, priority=90, keep_seconds=1000 + number)
        watched = policy_of(cache)
        assert len(watched._watched) <= 5 * 100
        assert len(watched._ends) + len(watched._unswept) <= 6 * 100
    cached = [number for number in range(3900, 4000) if cache.cached(name(number), 1)[name(number)]]
    assert len(cached) > 90
    cache.now = 10_000.0
    for each in "ABCD":
        cache.serve(each, 1)
    assert not policy_of(cache)._watched
    cache.manager.check_invariants()
