"""A reset of a large cache removes what it has forgotten in pieces."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books import books, prefix_tree
from fastdeploy_cache.books.graves import A_TURN, AT_ONCE

NUM_RUNS = AT_ONCE + 10 * A_TURN


def full_cache(num_cpu_blocks: int = 0) -> PrefixCacheManager:
    """As many prompts of one block as there are blocks, none of them in use."""
    cache = PrefixCacheManager(
        CacheConfig(block_size=1, num_gpu_blocks=NUM_RUNS, num_cpu_blocks=num_cpu_blocks, transfer_client="inline")
    )
    for number in range(NUM_RUNS):
        cache.release(computed(cache, f"old {number}", [number]))
    return cache


def computed(cache: PrefixCacheManager, name: str, tokens: list[int]) -> Request:
    request = Request(request_id=name, prompt_token_ids=tokens)
    match = cache.match(request)
    cache.allocate(request, len(tokens) - len(match.block_ids))
    cache.commit(request, len(tokens))
    return request


def test_a_reset_leaves_most_to_later_turns() -> None:
    """It removes so many runs itself and a few with each verb, and what is left can be had all the while."""
    with full_cache() as cache:
        cache.reset()
        gpu = cache.stats().gpu
        assert 0 < gpu.num_cached <= NUM_RUNS - AT_ONCE and gpu.num_available == NUM_RUNS
        cache.check_invariants()
        num_turns = 0
        while cache.stats().gpu.num_cached:
            num_turns += 1
            cache.check_invariants()
        assert 1 <= num_turns <= 10
        assert not cache._books.tree.graves.roots


def test_nothing_forgotten_is_found_and_its_room_is_given_at_once() -> None:
    """Right after a reset a request may take the whole pool, and no prompt of before hits."""
    with full_cache() as cache:
        cache.reset()
        assert cache.match(Request(request_id="again", prompt_token_ids=[1, 2])).num_tokens == 0
        whole = Request(request_id="whole", prompt_token_ids=list(range(NUM_RUNS)))
        cache.match(whole)
        assert cache.allocate(whole, NUM_RUNS) == list(range(NUM_RUNS))
        cache.check_invariants()


def test_a_caller_gets_the_forgotten_blocks_first() -> None:
    """Eviction of runs for a caller right after a reset gives it what is left of before."""
    with full_cache() as cache:
        cache.reset()
        num_free = cache.stats().gpu.num_free
        ids = cache.blocks.evict_runs(5)
        assert len(ids) == 5 and cache.stats().gpu.num_free >= num_free
        cache.check_invariants()
        cache.blocks.free(ids)
        assert len(cache.blocks.allocate(NUM_RUNS)) == NUM_RUNS
        cache.check_invariants()


@pytest.mark.parametrize("seed", range(6))
def test_what_is_held_stays_until_it_is_let_go(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Requests on branching prompts, released before, between and behind the pieces: nothing leaks, nothing is torn."""
    choose = random.Random(seed)
    monkeypatch.setattr(prefix_tree, "AT_ONCE", seed % 3)
    monkeypatch.setattr(books, "A_TURN", 1 + seed % 2)
    size = 600
    cache = PrefixCacheManager(
        CacheConfig(block_size=1, num_gpu_blocks=size, num_cpu_blocks=size, transfer_client="inline")
    )
    with cache:
        live, number = list[Request](), 0
        for _ in range(4):
            for _ in range(60):
                number += 1
                depth = choose.randint(1, 6)
                tokens = [choose.randint(0, 2) for _ in range(depth)] + [100 + number]
                request = computed(cache, f"r{number}", tokens)
                if choose.random() < 0.1 and len(live) < 20:
                    live.append(request)
                else:
                    cache.release(request)
            cache.reset()
            assert cache._books.tree.graves.open
            while live and choose.random() < 0.8:
                cache.release(live.pop(choose.randrange(len(live))))
                cache.check_invariants()
        while live:
            cache.release(live.pop())
            cache.check_invariants()
        cache.reset()
        while cache._books.tree.graves.open:
            cache.stats()
        assert cache.stats().gpu.num_free == size and cache.stats().cpu.num_free == size
        cache.check_invariants()
