"""Every name that the callers of SGLang's cache and pools use is there, or its page says that it is not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, RadixKey, ReqToTokenPool, new_config, new_manager
from fastdeploy_cache.adapters.sglang.slot_pools import TokenToKVPoolAllocator
from tests.rigs.original_surface import Surface, missing, unnamed

# SGLang 0.4.10.post2 and 0.5.5: what `managers/*.py`, `disaggregation/*.py` and `mem_cache/common.py` call of
# `tree_cache`. `rid` came with the first of these, `chunked`, `is_insert`, `prefix_keys` and an abort with the second.
TREE_CACHE: Surface = {
    "match_prefix": ("key", "rid=", "req=", "cow_mamba="),
    "insert": ("key", "value", "chunked"),
    "cache_finished_req": ("req", "is_insert"),
    "cache_unfinished_req": ("req", "chunked"),
    "inc_lock_ref": ("node",),
    "dec_lock_ref": ("node",),
    "evict": ("num_tokens",),
    "evict_host": ("num_tokens",),
    "evictable_size": (),
    "protected_size": (),
    "total_size": (),
    "init_load_back": ("last_node", "host_hit_length", "mem_quota"),
    "ready_to_load_host_cache": (),
    "check_hicache_events": (),
    "loading_check": (),
    "prefetch_from_storage": ("req_id", "last_host_node", "new_input_tokens", "last_hash", "prefix_keys"),
    "check_prefetch_progress": ("req_id",),
    "release_aborted_request": ("rid",),
    "get_height": ("node",),
    "take_events": (),
    "pretty_print": (),
    "reset": (),
    "root_node": None,
    "disable": None,
    "device": None,
    "page_size": None,
    "req_to_token_pool": None,
    "token_to_kv_pool_allocator": None,
    "load_back_threshold": None,
    "hicache_storage_pass_prefix_keys": None,
}
TREE_CACHE_NOT_HERE = (
    "cache_controller", "clear_storage_backend", "full_evictable_size", "swa_evictable_size", "evict_swa",
    "sanity_check", "write_backup", "writing_check", "all_values_flatten",
)  # fmt: skip
NODE: Surface = {
    "children": None,
    "parent": None,
    "backuped": None,
    "evicted": None,
    "get_last_hash_value": (),
    "get_prefix_hash_values": ("node",),
}
NODE_NOT_HERE = ("key", "value", "host_value", "lock_ref", "hit_count", "last_access_time", "protect_host")
KEY: Surface = {"token_ids": None, "extra_key": None, "__len__": (), "__iter__": (), "__getitem__": ("index",)}
MATCH: Surface = dict.fromkeys(("device_indices", "last_device_node", "last_host_node", "host_hit_length"))
# The same versions: what these files and `mem_cache/radix_cache.py` call of the pools.
ALLOCATOR: Surface = {
    "size": None,
    "page_size": None,
    "device": None,
    "available_size": (),
    "alloc": ("need_size",),
    "alloc_extend": ("prefix_lens", "seq_lens", "last_loc", "extend_num_tokens"),
    "alloc_decode": ("seq_lens", "last_loc"),
    "free": ("free_index",),
    "free_group_begin": (),
    "free_group_end": (),
    "clear": (),
}
ALLOCATOR_NOT_HERE = ("backup_state", "restore_state", "get_kvcache", "get_cpu_copy", "load_cpu_copy")
POOL: Surface = {
    "size": None,
    "max_context_len": None,
    "device": None,
    "req_to_token": None,
    "free_slots": None,
    "write": ("indices", "values"),
    "available_size": (),
    "alloc": ("need_size",),
    "free": ("free_index",),
    "clear": (),
}
POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")


def new_cache(num_tokens: int = 64, page_size: int = 1, *, as_tensors: bool = False) -> HiRadixCache:
    manager = new_manager(new_config(num_tokens, page_size, hicache_ratio=0, transfer_client="inline"))
    return HiRadixCache(manager, ReqToTokenPool(4, 64, as_tensors=as_tensors), as_tensors=as_tensors)


@pytest.fixture
def cache() -> Iterator[HiRadixCache]:
    made = new_cache()
    yield made
    made.manager.check_invariants()
    made.manager.close()


def test_every_call_of_the_scheduler_is_taken(cache: HiRadixCache) -> None:
    """Cache, nodes, keys, results and pools have the original's names and parameters."""
    cache.insert(RadixKey([1, 2]), cache.token_to_kv_pool_allocator.alloc(2))
    match = cache.match_prefix(rid="r", key=RadixKey(token_ids=[1, 2], extra_key=None))
    assert missing(cache, TREE_CACHE) == missing(match, MATCH) == missing(RadixKey([1]), KEY) == []
    for node in (match.last_device_node, cache.root_node, *cache.root_node.children.values()):
        assert missing(node, NODE) == []
    assert missing(cache.token_to_kv_pool_allocator, ALLOCATOR) == missing(cache.req_to_token_pool, POOL) == []


def test_the_page_names_what_is_not_here(cache: HiRadixCache) -> None:
    """What of the original cannot be called, or read of a node, is on the page, by its name."""
    assert len(missing(cache, dict.fromkeys(TREE_CACHE_NOT_HERE))) == len(TREE_CACHE_NOT_HERE)
    assert len(missing(cache.root_node, dict.fromkeys(NODE_NOT_HERE))) == len(NODE_NOT_HERE)
    assert unnamed("sglang.md", (*TREE_CACHE_NOT_HERE, *NODE_NOT_HERE, *ALLOCATOR_NOT_HERE)) == []


@pytest.mark.parametrize("policy", POLICIES)
def test_its_eviction_policies_are_ours(policy: str) -> None:
    """Each name of 0.5.5 can be set, and of those that came later two."""
    config = new_config(8, hicache_ratio=0, transfer_client="inline", eviction_policy=policy)
    new_manager(config).close()


def test_a_key_is_a_sequence_of_its_tokens() -> None:
    """Its length, its iteration and its slices are those of the tokens; a part keeps the extra key."""
    key = RadixKey([5, 6, 7, 8], "lora")
    assert len(key) == 4 and list(key) == [5, 6, 7, 8] and len(RadixKey([])) == 0
    parts = [key[1:3], key[:2], key[3]]
    assert [(part.token_ids, part.extra_key) for part in parts] == [
        ([6, 7], "lora"), ([5, 6], "lora"), ([8], "lora"),
    ]  # fmt: skip
    assert "extra_key='lora'" in repr(key) and "4 tokens" in repr(key)
    assert RadixKey(np.arange(9))[2:].token_ids.tolist() == list(range(2, 9))


@pytest.mark.parametrize("page_size", [1, 4])
def test_a_schedulers_own_steps_with_tensors(page_size: int) -> None:
    """Prefill in chunks, decoding, an end and a flush, by the calls that SGLang's scheduler makes, with tensors."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'fastdeploy-cache[torch]'")
    cache = new_cache(64, page_size, as_tensors=True)
    pool, allocator = cache.req_to_token_pool, cache.token_to_kv_pool_allocator
    assert isinstance(pool, ReqToTokenPool) and isinstance(allocator, TokenToKVPoolAllocator)
    tokens, num_found = list(range(30)), []
    for name in "ab":
        req = SimpleNamespace(rid=name, origin_input_ids=tokens, output_ids=[])
        match = cache.match_prefix(rid=name, key=RadixKey(token_ids=tokens[:-1]))
        req.prefix_indices, req.last_node, req.last_host_node, req.host_hit_length = match
        num_found.append(len(req.prefix_indices))
        cache.inc_lock_ref(req.last_node)
        for end in (17, 30) if name == "a" else (30,):
            req.fill_ids, prefix_len = tokens[:end], len(req.prefix_indices)
            (req.req_pool_idx,) = pool.alloc(1) or (-1,)
            last = req.prefix_indices[-1:] if prefix_len else torch.tensor([-1])
            lens = torch.tensor([prefix_len]), torch.tensor([end])
            out = allocator.alloc_extend(*lens, torch.cat([last]), end - prefix_len)
            pool.write((req.req_pool_idx, slice(prefix_len, end)), out)
            pool.write((req.req_pool_idx, slice(0, prefix_len)), req.prefix_indices)
            assert pool.req_to_token[req.req_pool_idx, :prefix_len].tolist() == req.prefix_indices.tolist()
            cache.cache_unfinished_req(req, chunked=end < 30)
            assert torch.cat([req.prefix_indices, torch.empty(0, dtype=torch.int64)]).dtype == torch.int64
            if end < 30:
                pool.free(req.req_pool_idx)
        for token in (90, 91, 92):
            req.output_ids.append(token)
            seq_lens, row = torch.tensor([30 + len(req.output_ids)]), torch.tensor([req.req_pool_idx])
            out = allocator.alloc_decode(seq_lens, pool.req_to_token[row, seq_lens - 2])
            pool.write((row, seq_lens - 1), out.to(torch.int32))
        req.output_ids.append(93)
        allocator.free_group_begin()
        cache.cache_finished_req(req)
        allocator.free_group_end()
        cache.manager.check_invariants()
    whole = 29 // page_size * page_size
    assert num_found == [0, whole] and pool.available_size() == pool.size
    assert cache.total_size() == 33 // page_size * page_size == 64 - allocator.available_size()
    assert cache.evict(1) and isinstance(cache.match_prefix([7]).device_indices, torch.Tensor)
    cache.reset()
    pool.clear()
    allocator.clear()
    assert allocator.available_size() == 64
    cache.manager.close()


def test_slots_are_arrays_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `as_tensors` PyTorch is never imported."""
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    cache = new_cache()
    assert isinstance(cache.token_to_kv_pool_allocator.alloc(1), np.ndarray)
    assert isinstance(cache.match_prefix([1]).device_indices, np.ndarray)
    cache.manager.close()
