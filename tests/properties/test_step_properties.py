"""Random steps beside the verbs that they stand for."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.policies import EVICTION_POLICIES

SIZE, NUM_BLOCKS = 2, 12
Sampled = tuple[list[int], int]  # tokens, and how many are computed


def new_cache(policy: str) -> PrefixCacheManager:
    """Without a CPU tier: copies down are started once for a step, and else with each verb."""
    config = CacheConfig(
        block_size=SIZE, num_gpu_blocks=NUM_BLOCKS, num_cpu_blocks=0, eviction_policy=policy, transfer_client="inline"
    )
    return PrefixCacheManager(config, clock=lambda: 1.0)


class Served:
    """The requests of one cache, by name, and their blocks."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self.cache = cache
        self.live: dict[str, Request] = {}
        self.blocks: dict[str, list[int]] = {}

    def start(self, name: str, prompt: list[int]) -> bool:
        request = Request(request_id=name, prompt_token_ids=prompt)
        ids = self.cache.match(request).block_ids
        try:
            self.blocks[name] = ids + self.cache.allocate(request, -(-len(prompt) // SIZE) - len(ids))
        except OutOfBlocksError:
            self.cache.release(request)
            return False
        self.live[name] = request
        return True

    def step(self, sampled: dict[str, Sampled]) -> set[str]:
        """One step of all; returns who found no room."""
        answers = self.cache.step([(self.live[name], *sampled[name]) for name in sampled])
        for name, answer in zip(sampled, answers, strict=True):
            assert isinstance(answer, list | OutOfBlocksError)
            self.blocks[name] += [] if isinstance(answer, OutOfBlocksError) else answer
        return {name for name, answer in zip(sampled, answers, strict=True) if isinstance(answer, OutOfBlocksError)}

    def step_by_verbs(self, sampled: dict[str, Sampled]) -> set[str]:
        """The same by `allocate`, `append_output` and `commit`."""
        refused = set()
        for name, (token_ids, num_computed) in sampled.items():
            request = self.live[name]
            missing = -(-(request.num_tokens + len(token_ids)) // SIZE) - len(self.blocks[name])
            try:
                self.blocks[name] += self.cache.allocate(request, missing) if missing > 0 else []
            except OutOfBlocksError:
                refused.add(name)
                continue
            request.append_output(token_ids)
            self.cache.commit(request, num_computed)
        return refused

    def end(self, name: str) -> None:
        self.cache.release(self.live.pop(name))
        del self.blocks[name]

    def tree(self) -> list[tuple[list[int], list[int], int]]:
        return [(v.token_ids.tolist(), v.block_ids, v.last_used) for v in self.cache.blocks.view.runs()]


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("seed", range(6))
def test_random_steps_do_what_the_verbs_do(policy: str, seed: int) -> None:
    """Blocks, refusals, hits and the tree are the same in two caches, of which one is driven by whole steps."""
    choose, num_refused = random.Random(seed), 0
    with new_cache(policy) as one, new_cache(policy) as other:
        mine, theirs = Served(one), Served(other)
        committed: dict[str, int] = {}
        for turn in range(120):
            if choose.random() < 0.3 and len(mine.live) < 5:
                prompt = [choose.randint(0, 1) for _ in range(choose.randint(1, 9))]
                assert mine.start(f"r{turn}", prompt) == theirs.start(f"r{turn}", prompt)
            sampled = {}
            for name in choose.sample(list(mine.live), len(mine.live)):
                token_ids = [choose.randint(0, 1) for _ in range(choose.choice((0, 1, 1, 1, 3)))]
                num_tokens = mine.live[name].num_tokens
                least = max(1, num_tokens - 3, committed.get(name, 0))
                sampled[name] = (token_ids, choose.randint(least, num_tokens))
            refused = mine.step(sampled)
            committed |= {name: num for name, (_, num) in sampled.items() if name not in refused}
            num_refused += len(refused)
            assert refused == theirs.step_by_verbs(sampled)
            assert mine.blocks == theirs.blocks
            one.check_invariants()
            for name in [n for n, r in mine.live.items() if choose.random() < 0.15 or r.num_tokens > 14]:
                mine.end(name)
                theirs.end(name)
        assert mine.tree() == theirs.tree()
        assert one.stats().gpu == other.stats().gpu
        assert num_refused > 0
