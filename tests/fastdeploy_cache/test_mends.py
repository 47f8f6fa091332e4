"""What was mended in the tree: memory that runs out while blocks are freed or runs are cut, and policies that raise."""

from __future__ import annotations

import contextlib
from array import array

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books import block_pool, evicting
from fastdeploy_cache.books import run as runs
from fastdeploy_cache.books.run import Run, Tier
from fastdeploy_cache.policies.eviction import SegmentedLeastRecentlyUsed
from tests.rigs.cache_model import CacheModel
from tests.rigs.scarce_memory import TightIds, no_memory, take_tight_ids

TEXT, OTHER = list(range(41)), list(range(100, 190))


def names(tokens: list[int]) -> Request:
    """A request that names tokens to verbs of callers."""
    return Request(request_id="names", prompt_token_ids=tokens)


def test_a_policy_may_raise_of_a_run_that_has_left_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs are joined, and the policy raises when it is told that the lower one goes: `lru` takes over, which could
    not compare the place that the old policy gave to that run with its own."""
    policy, raises = SegmentedLeastRecentlyUsed(lambda: 0.0), list[Run]()
    pull = policy.pull

    def fail_once(run: Run, tier: Tier) -> None:
        if is_armed:
            raises.append(run)
            raise ZeroDivisionError
        pull(run, tier)

    is_armed = False
    monkeypatch.setattr(policy, "pull", fail_once)
    config = CacheConfig(block_size=4, num_gpu_blocks=16, num_cpu_blocks=0, transfer_client="inline")
    with PrefixCacheManager(config, policy=policy) as cache:
        parted = TEXT[:16] + OTHER[:8]
        for tokens in (TEXT[:24], TEXT[:24], parted, OTHER[40:48]):
            request = names(tokens)
            num_hit = len(cache.match(request).block_ids)
            cache.allocate(request, len(tokens) // 4 - num_hit)
            cache.commit(request, len(tokens))
            cache.release(request)
        assert cache.blocks.evict(2) == 2 and len(cache.blocks.lookup(names(parted), touch=False).block_ids) == 4
        is_armed = True
        num_found = 0
        with contextlib.suppress(TypeError):  # of ranks that have no order
            num_found = len(cache.blocks.lookup(names(TEXT[:24])).block_ids)
        assert len(raises) == 1 and num_found == 6
        cache.check_invariants()


@pytest.mark.parametrize("policy", ["lru", "reuse"])
def test_an_eviction_without_memory_is_what_has_gone(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four small prompts are to go, and memory runs out at the second: the first one's blocks are free, and the others
    are as they were, whether the policy names many at once or one after the other."""
    model = CacheModel(4, 8, 0, policy=policy)
    for start in (0, 100, 200, 300):
        model.serve(list(range(start, start + 8)), stays=False, patient=True)
    pool, live = model.cache._books.pools[0], model.must_match(list(range(500, 529)))
    with monkeypatch.context() as patched:
        take_tight_ids(pool, patched)
        patched.setattr(evicting, "array", lambda code: TightIds(array(code), num_left=1))
        with pytest.raises(MemoryError):
            model.cache.allocate(live.request, 8)
    model.check()
    assert pool.num_free == 2
    assert model.allocate(live, 8)
    model.finish()


def test_a_long_run_is_shortened_though_no_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room may be made because there is none: the ids at its end go home without a list of their own."""
    num_blocks = 1200  # more ids than are kept as `bytes`
    config = CacheConfig(block_size=1, num_gpu_blocks=num_blocks, num_cpu_blocks=0, transfer_client="inline")
    with PrefixCacheManager(config) as cache:
        cache.blocks.insert(names(list(range(num_blocks))), cache.blocks.allocate(num_blocks))
        with monkeypatch.context() as patched:
            patched.setattr(runs, "array", no_memory)
            with contextlib.suppress(MemoryError):
                cache.blocks.evict(7)
        assert cache.stats().gpu.num_free == 7
        cache.check_invariants()


def test_a_run_is_shortened_though_its_names_get_no_memory() -> None:
    """The ids at its end are free already when its hashes are cut, so these go: they are found anew when asked for."""
    model = CacheModel(4, 12, 0)
    model.serve(TEXT, stays=False, patient=True)
    cache = model.cache
    before = cache.blocks.lookup(names(TEXT), hashes=True)
    (run,) = cache._books.tree.runs()
    run.hashes = TightIds(array("i", [0]))  # type: ignore[assignment]
    with contextlib.suppress(MemoryError):
        cache.blocks.evict(3)
    model.check()
    after = cache.blocks.lookup(names(TEXT), hashes=True)
    assert after.block_ids == before.block_ids[:7] and after.gpu_hash
    model.finish()


def test_runs_that_cannot_become_a_callers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two blocks of the run that is to go are being read, and there is no memory to tell them from the others: nothing
    has changed, and the next call gets the others."""
    model = CacheModel(4, 8, 8, write_policy="write_through_selective")
    blocks = model.cache.blocks
    ids = blocks.allocate(4)
    copy = blocks.copies.swap_out(names(TEXT[:8]), ids[:2])
    blocks.insert(names(TEXT[:16]), ids, used=False)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(evicting, "set", no_memory, raising=False)
        blocks.evict_runs(1)
    model.check()
    assert copy.num_blocks == 2 and len(blocks.lookup(names(TEXT[:16])).block_ids) == 4
    assert blocks.evict_runs(1) == ids[2:]
    model.client.land_all()
    blocks.free(ids[2:])
    model.finish()


def test_a_load_that_cannot_be_cut_in_two_stays_whole() -> None:
    """A run is to be cut while a load brings it, and there is no memory for the ids of the load's halves: nothing has
    changed, and the load lands."""
    model = CacheModel(4, 24, 40)
    model.serve_and_copy(TEXT, OTHER)
    live = model.must_match(TEXT)
    (transfer,) = model.cache._movement.mover.in_flight.values()
    (segment,) = transfer.segments
    ids, middle = segment.ids, names(TEXT[: 4 * (segment.start + 2)])
    segment.ids = TightIds(ids)  # type: ignore[assignment]
    with pytest.raises(MemoryError):
        model.cache.blocks.lookup(middle, split=True)
    segment.ids = ids
    model.check()
    model.cache.blocks.lookup(middle, split=True)
    assert len(transfer.segments) == 2
    model.client.land_all()
    assert len(model.settle(live)) == 10
    model.finish()


def test_what_a_reset_had_forgotten_goes_home_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory to free a run of it: it is looked at again with the next turn."""
    model = CacheModel(4, 24, 0)
    for tokens in (TEXT[:20], OTHER[:20]):
        model.serve(tokens, stays=False, patient=True)
    with monkeypatch.context() as patched:
        patched.setattr(Run, "free_ids", no_memory)
        model.reset()
    assert model.cache._books.mishaps.counts["settling"]
    model.check()
    assert model.cache.stats().gpu.num_free == 24
    model.steps_may_fail = True
    model.finish()


def test_blocks_that_are_being_read_wait_for_their_reader_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forgotten while a caller copies them down, and there is no memory to note that: they are free when that
    has ended."""
    model = CacheModel(4, 8, 8, write_policy="write_through_selective")
    blocks, request = model.cache.blocks, names(TEXT[:16])
    ids = blocks.allocate(4)
    copy = blocks.copies.swap_out(request, ids)
    blocks.insert(request, ids, used=False)
    last = blocks.lookup(request, hashes=True).last_hash
    with monkeypatch.context() as patched, contextlib.suppress(MemoryError):
        patched.setattr(block_pool, "set", no_memory, raising=False)
        blocks.drop(last)
    model.check()
    assert not blocks.lookup(request).num_blocks and model.cache.stats().gpu.num_free == 4
    model.client.land_all()
    assert copy.succeeded and model.cache.stats().gpu.num_free == 8
    model.finish()
