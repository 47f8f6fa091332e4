"""Callers insert blocks behind a prefix: what counts as there is what the prompt shares, not what follows it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.errors import RequestError

TEXT = list(range(32))
PARTED = [*TEXT[:8], *range(100, 124)]  # two blocks of the same


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    """It has the eight blocks of TEXT, in one run."""
    made = PrefixCacheManager(CacheConfig(block_size=4, num_gpu_blocks=32, num_cpu_blocks=0, transfer_client="inline"))
    made.blocks.insert(Request(request_id="names", prompt_token_ids=TEXT), made.blocks.allocate(8))
    yield made
    made.check_invariants()
    made.close()


def test_another_prompts_blocks_are_not_before_it(cache: PrefixCacheManager) -> None:
    """Its third and fourth blocks have been evicted; a run of another prompt goes on where these were."""
    parted, own = Request(request_id="parted", prompt_token_ids=PARTED), cache.blocks.allocate(4)
    with pytest.raises(RequestError, match="insert behind block 4"):
        cache.blocks.insert(parted, own, first_block=4)
    assert len(cache.blocks.lookup(parted).block_ids) == 2
    mixed = Request(request_id="mixed", prompt_token_ids=[*TEXT[:16], *PARTED[16:]])
    assert len(cache.blocks.lookup(mixed).block_ids) == 4, "nothing hangs behind the other prompt"
    cache.blocks.free(own)


def test_what_is_pinned_is_what_is_shared(cache: PrefixCacheManager) -> None:
    """Blocks of before a reset are not cached; the pin that was asked for holds what is there of the prompt."""
    parted, own = Request(request_id="parted", prompt_token_ids=PARTED), cache.blocks.allocate(4)
    done = cache.blocks.insert(parted, own, first_block=4, pin=True, generation=cache.blocks.generation - 1)
    assert done.duplicate_ids == own and done.num_blocks == 2
    assert done.pinned is not None and done.pinned.block_ids == cache.blocks.lookup(parted).block_ids
    cache.blocks.unpin(done.pinned)
    cache.blocks.free(own)
