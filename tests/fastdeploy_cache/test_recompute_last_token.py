"""A prompt that is cached whole: its last block is computed again or, if so configured, copied."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request
from fastdeploy_cache.books.causes import Cause
from tests.rigs.cache_model import CacheModel

TOKENS = list(range(1, 17))


def test_without_it_a_block_is_computed_again() -> None:
    """All but the last block hit."""
    model = CacheModel(4, 12, 0)
    model.serve(TOKENS, stays=False, patient=True)
    live = model.match(TOKENS)
    assert live is not None
    assert live.match.num_tokens == 12
    model.finish()


def test_with_it_all_but_the_last_token_hit() -> None:
    """Three shared blocks and a copy of the fourth, which is the request's own; nothing is left over at the end."""
    model = CacheModel(4, 12, 0, recompute_last_token=True)
    model.serve(TOKENS, stays=False, patient=True)
    live = model.match(TOKENS)
    assert live is not None
    assert (live.match.num_tokens, live.match.num_coming_tokens, live.match.ready) == (12, 3, False)
    shared = live.match.block_ids
    model.client.land_all()
    table = model.settle(live)
    assert (live.num_computed, len(table)) == (15, 4)
    assert table[3] not in shared
    shared = model.cache.stats().gpu
    assert (shared.num_cached, shared.num_private) == (4, 1)
    model.compute(live, 16)
    model.release(live)
    assert model.cache.stats().gpu.num_cached == 4
    model.finish()


@pytest.mark.parametrize("error", [None, "rank died"])
def test_a_copy_that_is_late_or_fails_is_a_miss(error: str | None) -> None:
    """The match is cut to the shared blocks; the copy's block goes home when its task has ended."""
    model = CacheModel(4, 12, 0, recompute_last_token=True)
    model.serve(TOKENS, stays=False, patient=True)
    live = model.match(TOKENS)
    assert live is not None
    if error is not None:
        model.client.land(error)
    assert model.settle(live) == live.match.block_ids
    assert live.num_computed == 12
    assert model.cache.stats().gpu.num_in_flight == (1 if error is None else 0)
    assert model.allocate(live, 1)
    model.check()
    model.client.land_all()
    assert model.cache.stats().gpu.num_in_flight == 0
    model.finish()


def test_no_room_for_a_copy_or_blocks_off_the_gpu_mean_no_copy() -> None:
    """Then the last block is computed again, as without the option."""
    model = CacheModel(4, 8, 8, recompute_last_token=True)
    model.serve_and_copy(TOKENS)
    other = model.match([50, *TOKENS])
    assert other is not None
    assert model.allocate(other, 4)
    live = model.match(TOKENS)
    assert live is not None
    model.client.land_all()
    model.settle(live)
    assert live.num_computed == 12
    model.finish()


def test_a_prompt_of_one_block() -> None:
    """Nothing is shared, all is copied."""
    model = CacheModel(4, 8, 0, recompute_last_token=True)
    model.serve(TOKENS[:4], stays=False, patient=True)
    live = model.match(TOKENS[:4])
    assert live is not None
    assert live.match.block_ids == []
    model.client.land_all()
    assert len(model.settle(live)) == 1
    assert live.num_computed == 3
    model.finish()


@pytest.mark.parametrize("num_blocks", [1, 2])
def test_what_was_copied_is_told_as_a_hit(num_blocks: int) -> None:
    """By the explanation, before and after the request is counted, and by the hit rate: also of a single block."""
    config = CacheConfig(block_size=4, num_gpu_blocks=16, transfer_client="inline", recompute_last_token=True)
    num_tokens = 4 * num_blocks
    with PrefixCacheManager(config) as cache:
        for name in ("first", "again"):
            request = Request(request_id=name, prompt_token_ids=TOKENS[:num_tokens])
            match = cache.match(request).wait(5.0)
            before = match.explain()
            cache.allocate(request, num_blocks - len(match.block_ids))
            cache.commit(request, num_tokens)
            cache.release(request)
        told = cache.explain("again")
        assert told is not None
        assert match.num_tokens == before.num_hit_tokens == told.num_hit_tokens == num_tokens - 1
        assert told.missed_tokens() == before.missed_tokens() == {Cause.LAST: 1}
        assert cache.stats().hit_rates["token"] == (num_tokens - 1) / (2 * num_tokens)
        assert cache.stats().hit_rates["request"] == 0.5


def test_a_match_that_would_end_inside_an_image_is_not_copied() -> None:
    """The last token belongs to an image of several tokens: it is not computed alone."""
    cache = PrefixCacheManager(
        CacheConfig(block_size=4, num_gpu_blocks=16, transfer_client="inline", recompute_last_token=True)
    )
    for name, found in (("a", 0), ("b", 12)):
        request = Request(request_id=name, prompt_token_ids=TOKENS, images=[(13, 3, "x")])
        match = cache.match(request)
        assert match.num_tokens == found
        cache.allocate(request, 4 - len(match.block_ids))
        cache.commit(request, 16)
        cache.release(request)
    cache.close()


def test_real_bytes() -> None:
    """The copy holds the block's bytes in all layers; writing its last token leaves the cached block as it was."""
    config = CacheConfig(
        block_size=4,
        num_gpu_blocks=16,
        transfer_client="inline",
        recompute_last_token=True,
        layout=KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype="float32"),
    )
    with PrefixCacheManager(config) as cache:
        first = Request(request_id="first", prompt_token_ids=TOKENS)
        cache.match(first)
        blocks = cache.allocate(first, 4)
        views = [part for layer in cache.ranks.kv_views(0) for part in layer.values()]
        for i, view in enumerate(views):
            view[blocks] = np.random.default_rng(i).random(view[blocks].shape)
        before = [view[blocks].copy() for view in views]
        cache.commit(first, 16)
        cache.release(first)
        again = Request(request_id="again", prompt_token_ids=TOKENS)
        match = cache.match(again).wait(5.0)
        assert (match.num_tokens, match.block_ids[:3]) == (15, blocks[:3])
        for view, original in zip(views, before, strict=True):
            assert (view[match.block_ids[:3]] == original[:3]).all()
            assert (view[match.block_ids[3], :3] == original[3, :3]).all()
            view[match.block_ids[3], 3] = 7.0
            assert (view[blocks] == original).all()
        cache.commit(again, 16)
        cache.release(again)
        cache.check_invariants()
