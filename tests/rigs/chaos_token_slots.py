"""Engines that think in slots of tokens or of sequences: SGLang, mini-sglang, no paging at all; for `chaos_rig`."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.adapters.mini_sglang import manager as mini_sglang_manager
from fastdeploy_cache.adapters.mini_sglang import radix_cache as mini_sglang
from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, MatchResult, RadixKey, ReqToTokenPool
from fastdeploy_cache.adapters.slots.copies import RankSlots
from fastdeploy_cache.adapters.slots.pages import Slots, pages_of
from fastdeploy_cache.adapters.slots.prefix_cache import SlotAllocator, SlotPrefixCache
from fastdeploy_cache.errors import OutOfBlocksError
from tests.rigs.chaos_rig import SECONDS, Driver, Prompt
from tests.rigs.sglang_engine import Req
from tests.rigs.storage_engine import drained

MOST_TOKENS = 64


class SGLang(Driver):
    """A scheduler over `HiRadixCache`: prompts are cached chunk by chunk, answers at their end."""

    def __init__(self, cache: PrefixCacheManager, *, overlap_loads: bool) -> None:
        super().__init__(cache)
        self._pool = ReqToTokenPool(8, MOST_TOKENS)
        self._tree = HiRadixCache(cache, self._pool, load_back_threshold=1, overlap_loads=overlap_loads)
        self.num_overlapped = 0
        self._slots = self._tree.token_to_kv_pool_allocator

    def admit(self, prompt: Prompt) -> bool:
        req = prompt.engine = Req(prompt.name, list(prompt.tokens), prompt.space or None)
        if self.cache.config.storage is not None:
            self._prefetch(req)
        match = self._tree.match_prefix(RadixKey(prompt.tokens[:-1], req.extra_key))
        slots, req.last_node = match.device_indices, match.last_device_node
        self._tree.inc_lock_ref(req.last_node)
        if match.host_hit_length:
            slots = self._load_back(req, slots, match)
        whole = self._extend(slots, len(slots), len(prompt.tokens) - len(slots))
        if whole is None:  # its load goes on; the next one to look may see it land
            self._tree.ready_to_load_host_cache()
            self._tree.dec_lock_ref(req.last_node)
            return False
        [req.req_pool_idx] = self._pool.alloc(1) or []
        req.prefix_indices, req.kv_allocated_len = slots, len(whole)
        self._pool.write((req.req_pool_idx, slice(len(whole))), whole)
        prompt.num_computed = len(slots)
        self._read_row(prompt)
        return self._has_arrived(prompt)

    def _prefetch(self, req: Req) -> None:
        """Storage is asked as the request is queued; it is admitted with what has come."""
        match = self._tree.match_prefix(RadixKey(req.origin_input_ids, req.extra_key))
        rest = req.origin_input_ids[len(match.device_indices) + match.host_hit_length :]
        self._tree.prefetch_from_storage(req.rid, match.last_host_node, rest)
        if self.patience:
            drained(self.cache)
        if not self._tree.check_prefetch_progress(req.rid):
            self._tree.terminate_prefetch(req.rid)

    def _load_back(self, req: Req, slots: Slots, match: MatchResult) -> Slots:
        loaded, node = self._tree.init_load_back(match.last_host_node, match.host_hit_length)
        if len(loaded):
            self._tree.inc_lock_ref(node)
            self._tree.dec_lock_ref(req.last_node)
            req.last_node = node
        return np.concatenate([slots, loaded])

    def _has_arrived(self, prompt: Prompt) -> bool:
        """Each worker waits for the last layer of what this batch computes on. A batch on a failed load is void."""
        if not (load_ids := self._tree.ready_to_load_host_cache()):
            return True
        arrived = True
        for rank, views in enumerate(self.kv.views):
            progress = self.cache.ranks.layer_progress(rank)
            assert progress is not None
            arrived = arrived and progress.wait_layer(load_ids, len(views) - 1, self.patience)
        if arrived:
            self.kv.check(prompt, prompt.num_computed)
            self.num_overlapped += 1
        assert self.cache.wait_for_transfers(SECONDS)
        failed = self._tree.check_hicache_events()
        if arrived and prompt.engine.last_node not in failed:
            return True
        self._tree.cache_finished_req(prompt.engine, is_insert=False)
        return False

    def _extend(self, slots: Slots, num_tokens: int, num_new: int) -> Slots | None:
        """Slots for more tokens; whole nodes make room."""
        found = self._slots.extend(slots, num_tokens, num_new)
        if found is None:
            num_missing = self.num_blocks(num_new) * self.kv.size - self._slots.available_size()
            self._tree.evict(num_missing)
            found = self._slots.extend(slots, num_tokens, num_new)
        return found

    def _read_row(self, prompt: Prompt) -> None:
        req = prompt.engine
        prompt.table = pages_of(self._pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len], self.kv.size)

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        req, end = prompt.engine, prompt.num_computed + num_tokens
        if end > req.kv_allocated_len:
            row = self._pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len]
            slots = self._extend(row, prompt.num_computed, num_tokens)
            if slots is None:
                return False
            req.kv_allocated_len = len(slots)
            self._pool.write((req.req_pool_idx, slice(len(slots))), slots)
            self._read_row(prompt)
        self.kv.write(prompt, end)
        prompt.num_computed = end
        if end <= len(req.origin_input_ids):
            req.fill_ids = prompt.tokens[:end]
            self._tree.cache_unfinished_req(req, chunked=end < len(req.origin_input_ids))
            self._read_row(prompt)
        req.output_ids = prompt.tokens[len(req.origin_input_ids) :]
        return True

    def end(self, prompt: Prompt) -> None:
        is_whole = prompt.num_computed == len(prompt.tokens)
        self._tree.cache_finished_req(prompt.engine, is_insert=is_whole)

    def rest(self) -> None:
        """A prompt that found no room after its load had begun has asked nobody for its end."""
        self._tree.check_hicache_events()

    def reset(self) -> None:
        self._tree.reset()


class MiniSGLang(Driver):
    """A scheduler over `CacheManager` and its page table. What it finds is on the GPU alone: copies are for others."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        super().__init__(cache)
        self._table = mini_sglang_manager.create_page_table(8, MOST_TOKENS)
        self._manager = mini_sglang_manager.CacheManager(mini_sglang.RadixPrefixCache(cache), self._table)
        self._rows = list(range(8))

    def admit(self, prompt: Prompt) -> bool:
        if self._manager.available_size < len(prompt.tokens):
            return False
        tokens = tokens_in_space(prompt)
        handle = self._manager.match_req(SimpleNamespace(input_ids=tokens)).cuda_handle
        self._manager.lock(handle)
        prompt.engine = SimpleNamespace(
            input_ids=tokens, table_idx=self._rows.pop(), cached_len=handle.cached_len,
            device_len=handle.cached_len, cache_handle=handle,
        )  # fmt: skip
        self._table[prompt.engine.table_idx, : handle.cached_len] = handle.get_matched_indices()
        prompt.num_computed = handle.cached_len
        self._read_row(prompt)
        return True

    def _read_row(self, prompt: Prompt) -> None:
        end = self.num_blocks(prompt.engine.device_len) * self.kv.size
        prompt.table = pages_of(self._table[prompt.engine.table_idx, :end], self.kv.size)

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        req = prompt.engine
        req.input_ids, req.device_len = tokens_in_space(prompt), prompt.num_computed + num_tokens
        try:
            self._manager.allocate_paged([req])
        except OutOfBlocksError:
            req.device_len = prompt.num_computed
            return False
        self._read_row(prompt)
        self.kv.write(prompt, req.device_len)
        prompt.num_computed = req.cached_len = req.device_len
        if num_tokens > 1:  # of a prompt, not of an answer
            self._manager.cache_req(req, finished=False)
            self._read_row(prompt)
        return True

    def end(self, prompt: Prompt) -> None:
        self._manager.cache_req(prompt.engine, finished=True)
        self._rows.append(prompt.engine.table_idx)

    def reset(self) -> None:
        self._manager.reset()


class ContiguousSlots(Driver):
    """Each sequence in a slot of its own. What it shares with another slot is copied there by the ranks; every other
    request goes on in the slot itself, where that is free."""

    def __init__(self, cache: PrefixCacheManager, max_slots: int) -> None:
        super().__init__(cache)
        self.num_kept_blocks = cache.config.pool_sizes()[0]
        self._slots = RankSlots(cache, max_slots, self.num_kept_blocks // max_slots)
        self._allocator = SlotAllocator(max_slots)
        self._index = SlotPrefixCache(max_capacity=200, allocator=self._allocator)
        self._num_asked = self.num_copied = 0

    def admit(self, prompt: Prompt) -> bool:
        self._num_asked += 1
        tokens = tokens_in_space(prompt)[:-1]
        found = self._index.find(tokens)
        if self._num_asked % 2 and found.length and self._allocator.is_free(found.slot):
            self._allocator.occupy(found.slot)
            slot, prompt.num_computed = found.slot, found.length
        else:
            slot = self._allocator.alloc()
            if slot < 0:
                return False
            prompt.num_computed = self._index.copy_slot(tokens, slot, self._slots)
            self.num_copied += prompt.num_computed
        prompt.engine = SimpleNamespace(slot=slot, pinned=[])
        prompt.table = list(self._slots.block_ids(slot))
        self._insert(prompt)
        return True

    def _insert(self, prompt: Prompt) -> None:
        """The slot holds what is computed, and nothing else that may be found."""
        tokens, before = tokens_in_space(prompt)[: prompt.num_computed], prompt.engine.pinned
        if tokens:
            slot = prompt.engine.slot
            self._index.insert(tokens, slot, self._allocator.version(slot))
        prompt.engine.pinned = tokens
        if before:
            self._index.release(before)

    def advance(self, prompt: Prompt, num_tokens: int) -> bool:
        self.kv.write(prompt, prompt.num_computed + num_tokens)
        prompt.num_computed += num_tokens
        self._insert(prompt)
        return True

    def end(self, prompt: Prompt) -> None:
        if prompt.engine.pinned:
            self._index.release(prompt.engine.pinned)
        self._allocator.free(prompt.engine.slot)

    def reset(self) -> None:
        self._index.reset()
        self.cache.reset()


def tokens_in_space(prompt: Prompt) -> list[int]:
    """For engines that know no spaces: the same tokens are other numbers in another one."""
    return [token + 1000 * bool(prompt.space) for token in prompt.tokens]
