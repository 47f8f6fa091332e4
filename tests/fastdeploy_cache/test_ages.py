"""How old blocks are when they go, how long they lay idle, and after how long they are used again."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.ages import Ages
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.metrics.histogram import Histogram
from tests.rigs.asker import Asker

A, B = range(100, 141), range(500, 541)  # ten full blocks of four and one token each


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def aged(asker: Asker) -> tuple[Ages, Clock]:
    """The ages of a cache, from now on by a clock of the test's."""
    ages, clock = asker.cache._books.residency.ages, Clock()
    ages._clock = clock
    return ages, clock


def num_and_mean(histogram: Histogram) -> tuple[int, float]:
    num = sum(histogram.counts)
    return num, histogram.total / num if num else 0.0


def test_a_block_is_as_old_as_its_stay_and_as_idle_as_its_last_use() -> None:
    """A prompt that comes at 1000 s, is used again at 1010 and goes at 1040 has been there for 40 seconds and idle for
    30, each of its blocks; before it goes nothing is counted."""
    asker = Asker(num_gpu=12)
    ages, clock = aged(asker)
    asker.serve(A)
    clock.now = 1010.0
    asker.serve(A)
    assert num_and_mean(ages.residency[GPU]) == (0, 0.0)
    clock.now = 1040.0
    asker.serve(B)
    asker.cache._seen.picture("running")  # as a scrape does
    num_gone = asker.cache.stats().gpu.num_evicted
    assert num_gone == 9, "there was room for two blocks and one that is not full"
    assert num_and_mean(ages.residency[GPU]) == (num_gone, pytest.approx(40.0))
    assert num_and_mean(ages.idle[GPU]) == (num_gone, pytest.approx(30.0))
    assert num_and_mean(ages.residency[CPU]) == (0, 0.0)


def test_a_copy_is_as_old_as_itself() -> None:
    """What was copied down at 1005 s and leaves the CPU tier at 1025 was there for 20 seconds, however long before it
    was on the GPU; it was used at 1000."""
    asker = Asker(num_gpu=40, num_cpu=12, cpu_write_policy="write_through")
    ages, clock = aged(asker)
    request, match = asker.match(A)
    asker.admit(request, match)
    asker.cache.commit(request, request.num_tokens)
    asker.cache.release(request)
    clock.now = 1005.0
    asker.client.land_all()
    clock.now = 1025.0
    asker.serve(B)
    num_gone = asker.cache.stats().cpu.num_evicted
    assert num_gone > 0
    assert num_and_mean(ages.residency[CPU]) == (num_gone, pytest.approx(20.0))
    assert num_and_mean(ages.idle[CPU]) == (num_gone, pytest.approx(25.0))


def test_a_gap_is_from_the_end_of_one_request_to_the_match_of_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation that ended at 1000 s and goes on at 1030 has a gap of 30 seconds, however long it then takes; a
    request that hits nothing, and one that is matched again after a preemption, has none."""
    asker = Asker()
    ages, clock = aged(asker)
    monkeypatch.setattr(SYSTEM_CLOCK, "now", clock)
    asker.serve(A)
    assert num_and_mean(ages.reuse_gaps) == (0, 0.0)
    clock.now = 1030.0
    request, match = asker.match([*A, *B])
    clock.now = 1090.0
    asker.admit(request, match)
    asker.cache.release(request)
    assert num_and_mean(ages.reuse_gaps) == (1, pytest.approx(30.0))
    again = asker.cache.match(request)
    asker.cache.allocate(request, 21 - len(again.block_ids))
    asker.cache.release(request)
    asker.serve(range(900, 920))
    assert num_and_mean(ages.reuse_gaps) == (1, pytest.approx(30.0))


def test_callers_without_requests_have_ages_too() -> None:
    """What an adapter inserts at 1000 s and uses again at 1010 has a gap of ten seconds; evicted at 1030 it was there
    for thirty and idle for twenty."""
    asker = Asker(num_gpu=12)
    ages, clock = aged(asker)
    cache: PrefixCacheManager = asker.cache
    request = Request(request_id="", prompt_token_ids=A)
    cache.blocks.insert(request, cache.blocks.allocate(10))
    assert num_and_mean(ages.reuse_gaps) == (0, 0.0)
    clock.now = 1010.0
    cache.blocks.note_use(request, num_found_blocks=10)
    assert num_and_mean(ages.reuse_gaps) == (1, pytest.approx(10.0))
    clock.now = 1030.0
    cache.blocks.evict(10)
    ages.count_evicted()
    assert num_and_mean(ages.residency[GPU]) == (10, pytest.approx(30.0))
    assert num_and_mean(ages.idle[GPU]) == (10, pytest.approx(20.0))


def prompts(choose: random.Random) -> Sequence[Sequence[int]]:
    """Conversations that go on, part and end."""
    texts = [[choose.randrange(9) for _ in range(choose.randrange(4, 40))] for _ in range(8)]
    return [[*choose.choice(texts)[: choose.randrange(4, 40)], *choose.choice(texts)] for _ in range(150)]


@pytest.mark.parametrize("num_cpu", [0, 12, 60])
@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_no_age_is_longer_than_the_cache_is_old(num_cpu: int, policy: str) -> None:
    """Prompts that share and part, split and join runs in both tiers: no block is older than the first request, nor was
    idle for longer, and all that were evicted have an age (which the invariants hold after each step)."""
    asker = Asker(num_gpu=30, num_cpu=num_cpu, eviction_policy=policy, cpu_write_policy="write_through")
    ages, clock = aged(asker)
    for tokens in prompts(random.Random(num_cpu)):
        asker.serve(tokens)
        clock.now += 1.0
    for histograms in (ages.residency, ages.idle):
        for tier in (GPU, CPU)[: 1 + (num_cpu == 12)]:
            num, mean = num_and_mean(histograms[tier])
            assert num > 0 and 0.0 <= mean <= 150.0
            assert sum(histograms[tier].counts[-7:]) == 0, "above 300 seconds"
