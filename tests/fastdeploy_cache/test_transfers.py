"""Copies between the tiers: late, failed, shared, split."""

from __future__ import annotations

import pytest

from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement.copy_down import MIN_STORE_BLOCKS
from tests.rigs.cache_model import CacheModel

A, B, C = ([base + i for i in range(100)] for base in (1000, 2000, 3000))


def test_evicted_blocks_come_back_from_the_cpu_tier_with_their_content() -> None:
    """A coming load is reported, waited for, and read (the model compares the content)."""
    model = CacheModel(4, 12, 40)
    model.serve_and_copy(A[:40], B[:40])
    live = model.match(A[:41])
    assert live is not None
    assert (live.match.num_tokens, live.match.num_coming_tokens, live.match.ready) == (8, 32, False)
    model.client.land_all()
    match = live.match.wait(0)
    assert (match.num_tokens, match.num_gpu_tokens, match.num_cpu_tokens, match.ready) == (40, 8, 32, True)
    model.settle(live)
    model.finish()


def test_a_failed_load_cuts_the_match_of_those_who_wait_and_of_nobody_else() -> None:
    """The blocks on the GPU stay matched, the CPU copies stay valid, and the next match loads them again."""
    model = CacheModel(4, 12, 40)
    model.serve_and_copy(A[:40], B[:40])
    first, second = model.match(A[:41]), model.match(A[:25])
    assert first is not None
    assert second is not None
    model.client.land("rank 0 died")
    assert first.match.wait(0).num_tokens == second.match.wait(0).num_tokens == 8
    model.release(first)
    model.release(second)
    third = model.match(A[:41])
    assert third is not None
    model.client.land_all()
    assert third.match.wait(0).num_tokens == 40
    model.finish()


def test_a_deeper_load_is_dropped_when_the_one_above_it_fails() -> None:
    """A second request loads more behind the first one's load; without its parent it must not become visible."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40], B[:40], C[:40])
    first = model.match(A[:25])
    second = model.match(A[:41])
    assert first is not None
    assert second is not None
    assert len(model.client.tasks) == 2, "the second request shares the first one's load and starts one behind it"
    model.client.land("rank 0 died")
    third = model.match(A[:41])
    assert third is not None
    assert len(model.client.tasks) == 2, "the third loads everything again: what is still in flight has no parent"
    model.client.land()
    model.check()
    assert second.match.wait(0).num_tokens == 16
    model.client.land()
    assert third.match.wait(0).num_tokens == 40
    model.finish()


def test_a_load_that_is_split_in_flight_lands_whole() -> None:
    """Another prompt parts from a run that is being loaded; both halves of the load still become readable."""
    model = CacheModel(4, 20, 40)
    model.serve_and_copy(A[:40], B[:40], C[:40])
    first = model.match(A[:41])
    assert first is not None
    assert first.match.num_coming_tokens == 40
    fork = model.match(A[:20] + B[:9])
    assert fork is not None
    assert fork.match.num_coming_tokens == 20
    model.client.land_all()
    model.check()
    assert (first.match.wait(0).num_tokens, fork.match.wait(0).num_tokens) == (40, 20)
    model.finish()


def test_computed_blocks_are_adopted_while_their_load_is_late() -> None:
    """A request that did not wait computes the blocks itself; they become the GPU copy and the load's ids go home."""
    model = CacheModel(4, 20, 40)
    model.serve_and_copy(A[:40], B[:36], C[:36])
    live = model.match(A[:41])
    assert live is not None
    assert live.match.num_coming_tokens > 0
    model.settle(live)
    assert model.allocate(live, 11 - len(model.settle(live)))
    model.compute(live, 41)
    model.client.land_all()
    model.check()
    again = model.match(A[:41])
    assert again is not None
    assert again.match.num_gpu_tokens == 40
    model.finish()


def test_a_match_short_of_room_loads_nothing_and_says_so() -> None:
    """A chain is loaded whole or not at all; the match never raises."""
    model = CacheModel(4, 12, 40)
    model.serve_and_copy(A[:40])
    model.serve(B[:40], stays=True, patient=True)
    model.client.land_all()
    live = model.match(A[:41])
    assert live is not None
    assert live.match.ready
    assert (live.match.num_tokens, live.match.num_unloaded_tokens) == (8, 32)
    model.finish()


def test_a_failed_copy_down_does_not_keep_later_blocks_out_of_the_cpu_tier() -> None:
    """The gap is copied again with the next copy, while its blocks are on the GPU."""
    n = MIN_STORE_BLOCKS
    model = CacheModel(1, 5 * n, 5 * n)
    live = model.match([i % 7 for i in range(4 * n)])
    assert live is not None
    assert model.allocate(live, 4 * n)
    for upto, error in ((n, None), (2 * n, "rank 0 died"), (2 * n + 1, None), (3 * n + 1, None)):
        model.compute(live, upto)
        model.land(error, 9)
    assert model.cache.stats().cpu.num_cached == 3 * n + 1
    model.finish()


def test_what_a_rank_could_not_copy_is_copied_after_its_next_use() -> None:
    """Also for a prompt that adds nothing: its release copies what is missing of what it used."""
    model = CacheModel(1, 40, 40)
    model.client.up = False
    model.serve(A[:20], stays=False, patient=True)
    assert model.cache.stats().cpu.num_cached == 0
    model.client.up = True
    model.serve_and_copy(A[:9])
    assert model.cache.stats().cpu.num_cached == 9
    model.serve_and_copy(A[:20])
    assert model.cache.stats().cpu.num_cached == 20
    model.finish()


def test_coming_blocks_do_come() -> None:
    """What an OutOfBlocksError promises is there once the copies have ended, and not more."""
    model = CacheModel(1, 6, 20)
    model.serve_and_copy(A[:5], B[:6])
    first, second = model.match(A[:6]), model.match(C[:6])
    assert first is not None
    assert second is not None
    assert first.match.num_coming_tokens == 5
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(second.request, 4)
    assert (refused.value.missing, refused.value.coming) == (3, 0)
    model.client.land_all()
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(second.request, 4)
    assert refused.value.missing == 3
    model.finish()


def test_a_copy_down_never_evicts_the_copies_that_it_continues() -> None:
    """A full CPU tier, a run copied in part, and a short prompt inside it: the copies stay."""
    model = CacheModel(1, 30, 8)
    model.serve_and_copy(A[:6])
    model.client.up = False
    model.serve(A[:12], stays=False, patient=True)
    model.client.up = True
    for _ in range(4):
        model.serve_and_copy(A[:3])
        assert model.cache.stats().cpu.num_cached >= 6
    model.finish()


def test_blocks_of_an_abandoned_copy_are_coming() -> None:
    """A whole-prompt hit that did not wait for its copy: the copy's block is promised, and comes."""
    model = CacheModel(4, 9, 0, recompute_last_token=True)
    model.serve(A[:16], stays=False, patient=True)
    live = model.match(A[:16])
    assert live is not None
    model.settle(live)
    other = model.match([60 + i for i in range(36)])
    assert other is not None
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(other.request, 9)
    missing, coming = refused.value.missing, refused.value.coming
    model.client.land_all()
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(other.request, 9)
    assert (missing - coming, 0) == (refused.value.missing, refused.value.coming)
    model.finish()
