"""Every name that the callers of mini-sglang's caches use is there, or its page says that it is not."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from fastdeploy_cache.adapters.mini_sglang import manager as mini_sglang_manager
from fastdeploy_cache.adapters.mini_sglang import radix_cache as mini_sglang
from fastdeploy_cache.adapters.mini_sglang.manager import CacheManager, create_page_table
from fastdeploy_cache.adapters.mini_sglang.radix_cache import RadixPrefixCache, new_manager
from tests.rigs.original_surface import Surface, missing, unnamed

# The public notebook that rebuilds the radix cache of mini-sglang (January 2026): its functions, and what it calls.
NOTEBOOK: Surface = {
    "get_mha_cache_per_page": ("head_dim", "num_kv_heads", "num_layers", "page_size", "tp_size", "dtype_size"),
    "get_num_pages_for_kv_cache": ("available_memory", "cache_per_page"),
    "create_page_table": ("max_running_req", "max_seq_len"),
    "print_radix_tree": ("root", "max_depth", "show_ref_count", "show_timestamp"),
}
NOTEBOOK_WALK: Surface = {"find_first_diff_pos": ("tensor1", "tensor2")}
NOTEBOOK_MANAGER: Surface = {
    "match_req": ("req",),
    "available_size": None,
    "lock": ("handle",),
    "unlock": ("handle",),
    "allocate": ("needed_len",),
    "free_and_cache_finished_req": ("old_handle", "input_ids", "indices"),
}
NOTEBOOK_NOT_HERE = ("RadixTreeNode", "walk", "root_node", "CacheManager(device, num_pages)")
# mini-sglang at 20fcd7f (March 2026): what `scheduler/*.py` calls of the cache manager, and that of the prefix cache.
PREFIX_CACHE: Surface = {
    "match_prefix": ("input_ids",),
    "lock_handle": ("handle", "unlock"),
    "insert_prefix": ("input_ids", "indices"),
    "evict": ("size",),
    "reset": (),
    "size_info": None,
    "check_integrity": (),
}
MANAGER: Surface = {
    "match_req": ("req",),
    "available_size": None,
    "lock": ("handle",),
    "unlock": ("handle",),
    "allocate_paged": ("reqs",),
    "cache_req": ("req", "finished="),
    "lazy_free_region": (),
    "check_integrity": (),
    "page_table": None,
    "page_size": None,
    "prefix_cache": None,
}
MANAGER_NOT_HERE = ("CacheManager(num_pages, page_size, page_table, type)", "free_slots", "create_prefix_cache")
HANDLE: Surface = {"cached_len": None, "get_matched_indices": ()}
SIZES: Surface = {"evictable_size": None, "protected_size": None, "total_size": None}


def test_every_call_of_notebook_and_scheduler_is_taken() -> None:
    """Functions, both classes, handles and sizes have the originals' names and parameters."""
    with new_manager(8) as manager:
        cache = RadixPrefixCache(manager)
        caches = CacheManager(cache, create_page_table(2, 8))
        assert missing(mini_sglang_manager, NOTEBOOK) == missing(mini_sglang, NOTEBOOK_WALK) == []
        assert missing(cache, PREFIX_CACHE) == missing(cache.size_info, SIZES) == []
        assert missing(caches, NOTEBOOK_MANAGER) == missing(caches, MANAGER) == []
        assert missing(cache.match_prefix([1]).cuda_handle, HANDLE) == []
        assert missing(cache.match_prefix([1]), {"cuda_handle": None}) == []


def test_the_page_names_what_is_not_here() -> None:
    """What of the originals cannot be called is on the page, by its name."""
    assert unnamed("mini_sglang.md", (*NOTEBOOK_NOT_HERE, *MANAGER_NOT_HERE)) == []


def test_a_notebook_that_locks_nothing_is_fine() -> None:
    """A request without a hit has the root's handle, or none: lock and unlock do nothing, however often."""
    with new_manager(8) as manager:
        caches = CacheManager(RadixPrefixCache(manager), create_page_table(2, 8))
        root = caches.prefix_cache.match_prefix([1, 2]).cuda_handle
        assert root.cached_len == 0
        for handle in (None, root):
            caches.lock(handle)
            for _ in range(2):
                caches.unlock(handle)
            caches.prefix_cache.lock_handle(handle, unlock=True)
        caches.free_and_cache_finished_req(root, [1, 2], caches.allocate(2))
        caches.free_and_cache_finished_req(root, [1, 2], caches.allocate(2))
        assert caches.prefix_cache.size_info == (2, 0) and caches.available_size == 8
        caches.check_integrity()


def test_slots_may_be_tensors() -> None:
    """With `as_tensors` PyTorch copies matched slots into its page table, and joins slots that are given."""
    torch = pytest.importorskip("torch", reason="needs PyTorch: pip install 'fastdeploy-cache[torch]'")
    with new_manager(8) as manager:
        table = torch.zeros((2, 8), dtype=torch.int32)
        caches = CacheManager(RadixPrefixCache(manager, as_tensors=True), table)
        tokens = torch.tensor([1, 3, 6, 7])
        root = caches.prefix_cache.match_prefix(tokens).cuda_handle
        caches.free_and_cache_finished_req(root, tokens, torch.cat([root.get_matched_indices(), caches.allocate(4)]))
        handle = caches.prefix_cache.match_prefix(tokens).cuda_handle
        table[0][:4].copy_(handle.get_matched_indices())
        assert caches.page_table[0].tolist() == [0, 1, 2, 3, 0, 0, 0, 0]
        evicted = caches.prefix_cache.evict(4)
        assert evicted.dtype == torch.int32 and evicted.tolist() == [0, 1, 2, 3]
        caches.free(evicted)
        caches.check_integrity()


def test_slots_are_arrays_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `as_tensors` PyTorch is never imported."""
    monkeypatch.setitem(sys.modules, "torch", None)  # an import would fail
    with new_manager(4) as manager:
        cache = RadixPrefixCache(manager)
        assert isinstance(cache.match_prefix([1]).cuda_handle.get_matched_indices(), np.ndarray)
