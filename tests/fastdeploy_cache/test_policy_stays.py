"""A policy that does what it should is never replaced by `lru`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.run import Run, Tier
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.policies.reuse import Reuse


def test_reuse_survives_what_is_touched_and_never_used() -> None:
    """Many leaves that a caller has inserted without a use: they are evicted, and the policy is not replaced."""
    config = CacheConfig(block_size=4, num_gpu_blocks=100, transfer_client="inline", eviction_policy="reuse")
    with PrefixCacheManager(config) as cache:
        for number in range(250):
            request = Request(request_id=str(number), prompt_token_ids=[number] * 4)
            cache.blocks.insert(request, cache.blocks.allocate(1), used=False)
        assert isinstance(cache._books.tree.policy.chosen, Reuse)
        assert cache.stats().gpu.num_evicted == 150
        cache.check_invariants()


class _OwnPolicy:
    """A policy by the words of `EvictionPolicy` alone: a set of leaves, of which any goes."""

    def clear(self, is_leaf: Callable[[Run, Tier], bool], split: Callable[[Run, int], Run]) -> None:
        self.leaves: tuple[dict[int, Run], ...] = ({}, {})

    def use(self, path: Sequence[Run], request: object, asked: object) -> None:
        pass

    def touch(self, path: Sequence[Run]) -> None:
        pass

    def grow(self, run: Run, first_block: int) -> None:
        pass

    def shrink(self, run: Run, first_block: int) -> None:
        pass

    def push(self, run: Run, tier: Tier) -> None:
        self.leaves[tier][id(run)] = run

    def pull(self, run: Run, tier: Tier) -> None:
        self.leaves[tier].pop(id(run), None)

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        return next(run for run in self.leaves[tier].values() if not run.num_held), num_blocks

    def coldest(self, tier: Tier) -> Generator[Run]:
        yield from self.leaves[tier].values()

    def is_colder(self, run: Run, than: Run) -> bool:
        return False

    def alike(self, upper: Run, lower: Run) -> bool:
        return False


def test_a_policy_by_the_words_of_the_protocol_stays() -> None:
    """One that keeps no marks hears of each leaf that ceases to be one, and so never names what is gone."""
    config = CacheConfig(block_size=4, num_gpu_blocks=20, transfer_client="inline")
    own = _OwnPolicy()
    with PrefixCacheManager(config, policy=own) as cache:
        for number in range(120):
            request = Request(request_id=str(number), prompt_token_ids=[number % 7] * 4 + [number] * 4)
            match = cache.match(request)
            cache.allocate(request, 2 - len(match.block_ids))
            cache.commit(request, 8)
            cache.release(request)
            cache.check_invariants()
        assert cache._books.tree.policy.chosen is own
        assert cache.stats().gpu.num_evicted > 50


class _Wrong(_OwnPolicy):
    """Names what is no leaf."""

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        return "a run", num_blocks  # type: ignore[return-value]

    def coldest(self, tier: Tier) -> Generator[Run]:  # type: ignore[empty-body]
        """An empty method, as of a class that has only the others."""


def test_what_a_policy_names_wrongly_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """With what it was, and a traceback; `lru` takes over. Calling nothing cold is no fault."""
    config = CacheConfig(block_size=4, num_gpu_blocks=4, transfer_client="inline")
    with PrefixCacheManager(config, policy=_Wrong()) as cache:
        assert list(cache._books.tree.policy.coldest(Tier.GPU)) == []
        assert cache._books.tree.policy.name == "_Wrong"
        for number in range(5):
            request = Request(request_id=str(number), prompt_token_ids=[number] * 4)
            cache.blocks.insert(request, cache.blocks.allocate(1))
        assert cache._books.tree.policy.name == "lru"
    (record,) = [each for each in caplog.records if "step_failed" in each.getMessage()]
    assert record.exc_info is not None and "victim is ('a run', 1)" in str(record.exc_info[1])


@pytest.mark.parametrize("policy", ["lru", object()])
def test_what_is_no_policy_is_refused(policy: object) -> None:
    """By the name of the first call that it lacks; nothing is left of the cache."""
    config = CacheConfig(block_size=4, num_gpu_blocks=4, transfer_client="inline")
    with pytest.raises(ConfigError, match=r"policy is .* which has no call '\w+'; give an object .* eviction_policy"):
        PrefixCacheManager(config, policy=policy)  # type: ignore[arg-type]
