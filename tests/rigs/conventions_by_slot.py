"""Engines that think in slots of tokens: SGLang, mini-sglang, and contiguous slots without paging."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from types import SimpleNamespace

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.adapters.mini_sglang import manager as mini_sglang_manager
from fastdeploy_cache.adapters.mini_sglang import radix_cache as mini_sglang
from fastdeploy_cache.adapters.sglang import radix_cache as sglang
from fastdeploy_cache.adapters.slots.copies import RankSlots
from fastdeploy_cache.adapters.slots.prefix_cache import SlotAllocator, SlotPrefixCache

_MAX_TOKENS = 2048


class SGLang:
    """`match_prefix`, lock, load back, slots, `cache_unfinished_req`, `cache_finished_req`."""

    name = "SGLang"

    def __init__(self, config: CacheConfig) -> None:
        self.cache, self.token_granularity = sglang.new_manager(config), config.block_size
        self._pool = sglang.ReqToTokenPool(1, _MAX_TOKENS)
        self._tree = sglang.HiRadixCache(self.cache, self._pool)
        self._allocator = self._tree.token_to_kv_pool_allocator

    def begin(self, prompt: list[int]) -> int:
        match = self._tree.match_prefix(prompt[:-1])
        slots, node = match.device_indices, match.last_device_node
        self._tree.inc_lock_ref(node)
        if match.host_hit_length:
            loaded, deeper = self._tree.init_load_back(match.last_host_node, match.host_hit_length)
            if len(loaded):
                self._tree.inc_lock_ref(deeper)
                self._tree.dec_lock_ref(node)
                slots, node = np.concatenate([slots, loaded]), deeper
        rows = self._pool.alloc(1)
        assert rows is not None
        self._req = SimpleNamespace(
            rid="one", req_pool_idx=rows[0], origin_input_ids=prompt[:], output_ids=[], prefix_indices=slots,
            last_node=node, fill_ids=prompt[: len(slots)], kv_allocated_len=len(slots),
        )  # fmt: skip
        self._pool.write((rows[0], slice(len(slots))), slots)
        return len(slots)

    def blocks(self, num_tokens: int) -> Sequence[int]:
        req = self._req
        size, num_before = self.token_granularity, -(-req.kv_allocated_len // self.token_granularity)
        slots = self._pool.req_to_token[req.req_pool_idx, : num_before * size]
        need = num_tokens - req.kv_allocated_len
        whole = self._allocator.extend(slots, req.kv_allocated_len, need)
        if whole is None:
            self._tree.evict(need)
            whole = self._allocator.extend(slots, req.kv_allocated_len, need)
        if whole is None:
            raise MemoryError("no room for one sequence alone")
        self._pool.write((req.req_pool_idx, slice(len(whole))), whole)
        req.kv_allocated_len = num_tokens
        return list(self._pool.req_to_token[req.req_pool_idx, : len(whole) : size] // size)

    def computed(self, tokens: list[int], num_computed: int) -> None:
        self._req.output_ids = tokens[len(self._req.origin_input_ids) :]
        self._req.fill_ids = tokens[:num_computed]
        if num_computed == len(self._req.origin_input_ids):
            self._tree.cache_unfinished_req(self._req)

    def end(self, tokens: list[int]) -> None:
        self._req.output_ids = tokens[len(self._req.origin_input_ids) :]
        self._tree.cache_finished_req(self._req)

    def close(self) -> None:
        self.cache.close()


class MiniSGLang:
    """`match_req`, lock, `allocate_paged`, `cache_req`."""

    name = "mini-sglang"

    def __init__(self, config: CacheConfig) -> None:
        num_pages, _ = config.pool_sizes()
        settings = {"layout": config.layout, "transfer": config.transfer, "num_cpu_blocks": config.num_cpu_blocks}
        self.cache = mini_sglang.new_manager(
            num_pages, config.block_size, transfer_client=config.transfer_client, **settings
        )
        self.token_granularity = config.block_size
        self._table = mini_sglang_manager.create_page_table(1, _MAX_TOKENS)
        self._pages = mini_sglang_manager.CacheManager(mini_sglang.RadixPrefixCache(self.cache), self._table)

    def begin(self, prompt: list[int]) -> int:
        handle = self._pages.match_req(SimpleNamespace(input_ids=prompt)).cuda_handle
        self._pages.lock(handle)
        self._table[0, : handle.cached_len] = handle.get_matched_indices()
        self._req = SimpleNamespace(
            input_ids=prompt[:], table_idx=0, cached_len=handle.cached_len, device_len=handle.cached_len,
            cache_handle=handle,
        )  # fmt: skip
        return handle.cached_len

    def blocks(self, num_tokens: int) -> Sequence[int]:
        self._req.cached_len, self._req.device_len = self._req.device_len, num_tokens
        self._pages.allocate_paged([self._req])
        size = self.token_granularity
        return list(self._table[0, : -(-num_tokens // size) * size : size] // size)

    def computed(self, tokens: list[int], num_computed: int) -> None:
        self._req.input_ids, self._req.cached_len = tokens, num_computed

    def end(self, tokens: list[int]) -> None:
        self._req.input_ids = tokens
        self._pages.cache_req(self._req, finished=True)

    def close(self) -> None:
        self.cache.close()


class ContiguousSlots:
    """`find`, `copy_slot` through the ranks, `insert`. Finished sequences stay in their slots until these run out."""

    name = "contiguous slots"
    token_granularity = 1

    def __init__(self, config: CacheConfig, max_slots: int) -> None:
        self.cache = PrefixCacheManager(config)
        self._slots = RankSlots(self.cache, max_slots, config.pool_sizes()[0] // max_slots)
        self._allocator = SlotAllocator(max_slots)
        self._index = SlotPrefixCache(max_capacity=100_000, allocator=self._allocator)
        self._kept: OrderedDict[int, None] = OrderedDict()  # slots of finished sequences

    def begin(self, prompt: list[int]) -> int:
        slot = self._allocator.alloc()
        if slot < 0:
            self._allocator.free(self._kept.popitem(last=False)[0])
            slot = self._allocator.alloc()
        self._slot = slot
        return self._index.copy_slot(prompt[:-1], slot, self._slots)

    def blocks(self, num_tokens: int) -> Sequence[int]:
        return self._slots.block_ids(self._slot)

    def computed(self, tokens: list[int], num_computed: int) -> None:
        pass

    def end(self, tokens: list[int]) -> None:
        computed = tokens[:-1]
        self._index.insert(computed, self._slot, self._allocator.version(self._slot))
        self._index.release(computed)
        self._kept[self._slot] = None

    def close(self) -> None:
        self._slots.close()
        self.cache.close()
