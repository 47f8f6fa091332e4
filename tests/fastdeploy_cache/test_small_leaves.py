"""Many small leaves that are evicted in one pass are those that would have gone one by one."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.run import Run, Tier

NUM_BLOCKS, SIZE = 96, 4


def life(seed: int, policy: str, cpu_ratio: int) -> list[object]:
    """Prompts of all lengths that share beginnings, in a small pool: their ids and hits, and what is left of each."""
    rng, seen = random.Random(seed), list[object]()
    config = CacheConfig(
        block_size=SIZE,
        num_gpu_blocks=NUM_BLOCKS,
        num_cpu_blocks=NUM_BLOCKS * cpu_ratio,
        eviction_policy=policy,
        transfer_client="inline",
    )
    with PrefixCacheManager(config) as cache:
        for number in range(150):
            head = [rng.randrange(3)] * (SIZE * rng.choice((0, 1, 1, 3)))
            tail = [100 + rng.randrange(60)] * (SIZE * rng.choice((1, 1, 1, 2, 5, 40)))
            request = Request(request_id=str(number), prompt_token_ids=[*head, *tail, 1])
            match = cache.match(request).wait()
            ids = cache.allocate(request, cache.blocks_for(request.num_tokens) - len(match.block_ids))
            cache.commit(request, request.num_tokens)
            cache.release(request)
            seen += [match.num_tokens, match.block_ids, ids]
            cache.check_invariants()
        stats = cache.stats()
        return [*seen, stats.gpu, stats.cpu]


@pytest.mark.parametrize("cpu_ratio", [0, 2])
@pytest.mark.parametrize("policy", ["lru", "mru", "fifo", "lfu", "slru"])
@pytest.mark.parametrize("seed", [1, 2])
def test_what_goes_together_would_have_gone_one_by_one(
    seed: int, policy: str, cpu_ratio: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same life, once with each leaf asked for by itself: the same ids and hits throughout."""
    together, small = [], GuardedPolicy.small_leaves

    def watched(self: GuardedPolicy, tier: Tier, num_blocks: int) -> list[Run]:
        runs = small(self, tier, num_blocks)
        together.append(len(runs))
        return runs

    monkeypatch.setattr(GuardedPolicy, "small_leaves", watched)
    found = life(seed, policy, cpu_ratio)
    assert max(together) > 1 and sum(together) > 10
    monkeypatch.setattr(GuardedPolicy, "small_leaves", lambda *_: [])
    assert life(seed, policy, cpu_ratio) == found
