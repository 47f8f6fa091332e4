"""How much one step does under the lock, counted: no time is measured here, `bench control` does that."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.run import Run, Tier
from fastdeploy_cache.movement.copy_down import MAX_LOOKED


def test_the_first_eviction_of_a_full_pool_puts_few_entries_right() -> None:
    """Whatever happened while it filled: leaves are not ranked before their first use, and each later use mends one."""
    num_prompts, num_ranked = 500, 0
    config = CacheConfig(block_size=1, num_gpu_blocks=2 * num_prompts, num_cpu_blocks=0, transfer_client="inline")

    class Counting(LeastRecentlyUsed):
        def rank(self, run: Run) -> Any:
            nonlocal num_ranked
            num_ranked += 1
            return super().rank(run)

    with PrefixCacheManager(config, policy=Counting(lambda: 0.0)) as cache:
        for number in (*range(num_prompts), *range(num_prompts // 2)):
            request = Request(request_id="a", prompt_token_ids=[number, 7])
            num_found = len(cache.match(request).block_ids)
            cache.allocate(request, 2 - num_found)
            cache.commit(request, 2)
            cache.release(request)
        for number in range(num_prompts // 2, num_prompts):
            cache.blocks.lookup(Request(request_id="b", prompt_token_ids=[number, 7]))
        assert cache.stats().gpu.num_free == 0
        num_ranked = 0
        assert cache.blocks.evict(1) == 1
        assert num_ranked < 20


def test_a_look_at_the_cold_end_goes_over_a_bounded_number_of_leaves() -> None:
    """Under the lock: also where the reserve has thousands of one-block runs, and as many of them have no copy."""
    num_prompts, num_seen = 3 * MAX_LOOKED, [0]
    config = CacheConfig(
        block_size=1,
        num_gpu_blocks=num_prompts,
        num_cpu_blocks=num_prompts,
        transfer_client="inline",
        cpu_write_high_water=0.01,
    )

    class Seen(LeastRecentlyUsed):
        def coldest(self, tier: Tier) -> Generator[Run]:
            num_seen.append(0)
            for run in super().coldest(tier):
                num_seen[-1] += 1
                yield run

    with PrefixCacheManager(config, policy=Seen(lambda: 0.0)) as cache:
        for number in range(2 * num_prompts):
            request = Request(request_id="a", prompt_token_ids=[number])
            cache.match(request)
            cache.allocate(request, 1)
            cache.commit(request, 1)
            cache.release(request)
    assert MAX_LOOKED // 2 < max(num_seen) <= MAX_LOOKED + 1
