"""Many small leaves that are evicted in one pass are those that would have gone one by one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.leaves.policy import Asked, EvictionPolicy, Hints, LeastRecentlyUsed
from fastdeploy_cache.books.run import Run, Tier

NUM_BLOCKS, SIZE = 96, 4


def life(seed: int, policy: str | EvictionPolicy, cpu_ratio: int) -> list[object]:
    """Prompts of all lengths that share beginnings, in a small pool: their ids and hits, and what is left of each."""
    rng, seen = random.Random(seed), list[object]()
    config = CacheConfig(
        block_size=SIZE,
        num_gpu_blocks=NUM_BLOCKS,
        num_cpu_blocks=NUM_BLOCKS * cpu_ratio,
        eviction_policy=policy if isinstance(policy, str) else "lru",
        transfer_client="inline",
    )
    with PrefixCacheManager(config, policy=None if isinstance(policy, str) else policy) as cache:
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
        assert isinstance(policy, str) or stats.num_failed_steps["policy"] == 0, "it is in force to the end"
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


class Fair(LeastRecentlyUsed):
    """Its ranks follow what it hears of losses: who has lost most goes last."""

    name = "fair"

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.num_lost = [0, 0, 0]

    def rank(self, run: Run) -> tuple[int, int]:
        return self.num_lost[run.tokens[0] % 3], run.usage.last_used

    def shrink(self, run: Run, first_block: int) -> None:
        self.num_lost[run.tokens[0] % 3] += run.num_blocks - first_block


class Around:
    """A policy that has another one inside, and is none of its kind."""

    name = "around"

    def __init__(self) -> None:
        self.inner = LeastRecentlyUsed(lambda: 0.0)

    def __getattr__(self, name: str) -> object:
        return getattr(self.inner, name)


class Noting(LeastRecentlyUsed):
    """It keeps what it knows of a run in the run's use, as policies of others may."""

    name = "noting"

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        for run in path:
            run.usage.gap, run.usage.turn = run.usage.gap + 0.5, run.usage.num_uses + 1
            run.usage.is_shared = run.usage.is_shared or False
        super().use(path, request, asked)

    def rank(self, run: Run) -> tuple[float, int, float, int]:
        return run.usage.gap, run.usage.turn, run.usage.priority, run.usage.last_used


@pytest.mark.parametrize("new", [Fair, Around, Noting])
def test_policies_of_others_name_each_leaf(new: Callable[[], EvictionPolicy], monkeypatch: pytest.MonkeyPatch) -> None:
    """One whose ranks follow its losses, one that wraps another, one that notes in the run: each stays in force, and
    decides the same where leaves never go together."""
    found = life(3, new(), 0)
    monkeypatch.setattr(GuardedPolicy, "small_leaves", lambda *_: [])
    assert life(3, new(), 0) == found
