"""Every name that the callers of vLLM's block pool use is there, or its page says that it is not."""

from __future__ import annotations

from fastdeploy_cache.adapters.vllm import manager as vllm
from tests.rigs.original_surface import Surface, missing, unnamed
from tests.rigs.vllm_engine import view

# vLLM at the end of 2024 (0.6.4), `vllm/v1/core/kv_cache_utils.py`, as `kv_cache_manager.py` and its tests use it.
EARLY: Surface = {
    "hash_block_tokens": ("parent_block_hash", "curr_block_token_ids"),
    "hash_request_tokens": ("block_size", "token_ids"),
    "KVCacheBlock": ("block_id",),
    "FreeKVCacheBlockQueue": ("blocks",),
}
EARLY_BLOCK: Surface = {
    "block_id": None,
    "ref_cnt": None,
    "token_ids": None,
    "block_hash": None,
    "num_hashed_tokens": None,
    "prev_free_block": None,
    "next_free_block": None,
    "reset": (),
}
EARLY_QUEUE: Surface = {
    "num_free_blocks": None,
    "free_list_head": None,
    "free_list_tail": None,
    "popleft": (),
    "remove": ("block",),
    "append": ("block",),
    "get_all_free_blocks": (),
}
# vLLM 0.8, `vllm/v1/core/sched/scheduler.py`: what it calls of its `KVCacheManager`.
SCHEDULER: Surface = {
    "usage": None,
    "block_pool": None,
    "block_size": None,
    "get_computed_blocks": ("request",),
    "allocate_slots": ("request", "num_new_tokens", "new_computed_blocks", "num_lookahead_tokens"),
    "free": ("request",),
    "reset_prefix_cache": (),
}
SCHEDULER_NOT_HERE = ("free_block_hashes", "get_num_common_prefix_blocks", "make_prefix_cache_stats")
BLOCK_POOL: Surface = {
    "blocks": None,
    "free_block_queue": None,
    "num_gpu_blocks": None,
    "get_new_blocks": ("num_blocks",),
    "free_blocks": ("ordered_blocks",),
    "get_cached_block": ("block_hash",),
    "get_num_free_blocks": (),
    "get_usage": (),
}
BLOCK_POOL_NOT_HERE = ("block_pool.touch", "cache_full_blocks")
POOLED_BLOCK: Surface = {"block_id": None, "ref_cnt": None, "block_hash": None, "is_null": None}


def test_the_early_names_take_the_early_calls() -> None:
    """Functions, blocks and queue have the names, parameters and attributes of the end of 2024."""
    block = vllm.KVCacheBlock(0)
    queue = vllm.FreeKVCacheBlockQueue([block])
    assert [missing(vllm, EARLY), missing(block, EARLY_BLOCK), missing(queue, EARLY_QUEUE)] == [[], [], []]


def test_the_scheduler_finds_what_it_calls() -> None:
    """The view, its pool and its blocks have what vLLM's scheduler uses; the page names what they have not."""
    kv = view()
    pool = kv.block_pool
    assert [missing(kv, SCHEDULER), missing(pool, BLOCK_POOL), missing(pool.blocks[0], POOLED_BLOCK)] == [[], [], []]
    assert len(missing(kv, dict.fromkeys(SCHEDULER_NOT_HERE))) == len(SCHEDULER_NOT_HERE)
    assert unnamed("vllm.md", (*SCHEDULER_NOT_HERE, *BLOCK_POOL_NOT_HERE)) == []
    kv.manager.close()
