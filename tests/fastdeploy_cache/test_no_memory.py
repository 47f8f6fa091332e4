"""Memory that runs out between two lines, and what is read by somebody whom the tree does not know."""

from __future__ import annotations

from array import array

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.evicting import drop_spare_copies
from fastdeploy_cache.books.run import Run, Tier
from tests.rigs.cache_model import CacheModel
from tests.rigs.manual_clock import ManualClock

TEXT = list(range(41))


def test_half_an_insertion_is_pinned_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt parts from another one inside a run, and memory runs out behind the cut: what was reached is pinned, and
    the rest is published by the next commit."""
    cache = PrefixCacheManager(CacheConfig(block_size=4, num_gpu_blocks=24, num_cpu_blocks=0, transfer_client="inline"))
    long, other = (
        Request(request_id="long", prompt_token_ids=TEXT[:24]),
        Request(request_id="other", prompt_token_ids=TEXT[:16] + TEXT[30:38]),
    )
    for request in (long, other):
        cache.match(request)
        cache.allocate(request, 6)
    cache.commit(long, 24)
    add_ids = Run.add_ids

    def fail(run: Run, tier: Tier, ids: array[int]) -> None:
        monkeypatch.setattr(Run, "add_ids", add_ids)
        raise MemoryError

    monkeypatch.setattr(Run, "add_ids", fail)
    cache.commit(other, 24)
    cache.check_invariants()
    cache.commit(other, 24)
    cache.check_invariants()
    assert len(cache.blocks.lookup(other).block_ids) == 6
    for request in (long, other):
        cache.release(request)
    cache.close()


def test_a_refused_commit_leaves_no_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokens do not count as computed, and what the next one says of the speed is true."""
    clock = ManualClock()
    cache = PrefixCacheManager(
        CacheConfig(block_size=4, num_gpu_blocks=80, num_cpu_blocks=0, transfer_client="inline"), clock=clock
    )
    request = Request(request_id="long", prompt_token_ids=list(range(300)))
    cache.match(request)
    cache.allocate(request, 75)
    samples: list[tuple[int, float]] = []
    monkeypatch.setattr(
        cache._movement.speeds, "note_prefill", lambda num_tokens, seconds: samples.append((num_tokens, seconds))
    )
    add_ids = Run.add_ids

    def fail(run: Run, tier: Tier, ids: array[int]) -> None:
        monkeypatch.setattr(Run, "add_ids", add_ids)
        raise MemoryError

    monkeypatch.setattr(Run, "add_ids", fail)
    clock.advance(1.0)
    with pytest.raises(MemoryError):
        cache.commit(request, 280)
    clock.advance(0.5)
    cache.commit(request, 260)
    assert samples == [(260, 1.5)]
    cache.check_invariants()
    cache.release(request)
    cache.close()


def test_a_copy_that_is_read_is_not_spare() -> None:
    """A caller fills its own blocks from the CPU tier, and what it reads is on the GPU, too: the copies stay until they
    have been read, or the task would read what they are filled with next."""
    model = CacheModel(4, 24, 40)
    model.serve_and_copy(TEXT)
    cache, request = model.cache, Request(request_id="names", prompt_token_ids=TEXT)
    ids = cache.blocks.allocate(10)
    copy = cache.blocks.copies.swap_in(request, ids)
    residency, runs = cache._books.residency, [run for run in cache._books.tree.runs() if run.cpu and run.gpu]
    assert copy.num_blocks == 10 and runs

    def dropped() -> int:
        with cache._books:
            for run in runs:
                drop_spare_copies(residency, run)
        return sum(not run.cpu for run in runs)

    assert not dropped()
    model.client.land_all()
    assert copy.succeeded and dropped() == len(runs)
    cache.blocks.free(ids)
    model.finish()


def test_a_load_that_gets_no_memory_keeps_no_pin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left of it, and the next one loads."""
    model = CacheModel(4, 24, 40)
    model.serve_and_copy(TEXT, list(range(100, 190)))
    copies, request = model.cache.blocks.copies, Request(request_id="names", prompt_token_ids=TEXT)

    def fail(*_: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(copies._loader, "start", fail)
        copies.load(request)
    model.cache.check_invariants()
    load = copies.load(request)
    assert load is not None and load.num_blocks
    model.client.land_all()
    assert load.succeeded
    model.finish()


def test_a_loss_is_told_though_no_memory_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was forgotten cannot be cleared away yet: nothing of the lost arrays is found all the same."""
    model = CacheModel(4, 24, 40)
    model.serve_and_copy(TEXT, list(range(100, 190)))
    cache = model.cache
    graves = cache._books.tree.graves
    clear, before = graves.clear, cache.blocks.generation

    def fail(num_runs: int) -> None:
        monkeypatch.setattr(graves, "clear", clear)
        raise MemoryError

    monkeypatch.setattr(graves, "clear", fail)
    cache.ranks.kv_lost(0)
    assert cache.blocks.generation > before and cache.stats().num_failed_steps["settling"] == 1
    assert not cache.blocks.lookup(Request(request_id="names", prompt_token_ids=TEXT)).block_ids
    cache.check_invariants()
    model.steps_may_fail = True
    model.finish()
