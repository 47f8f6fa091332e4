"""What SGLang's scheduler does with its cache, over simulated blocks that remember what they hold."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdeploy_cache.adapters.sglang.radix_cache import HiRadixCache, RadixKey, ReqToTokenPool, new_config, new_manager
from fastdeploy_cache.adapters.slots.pages import Slots
from tests.rigs.simulated_client import SimulatedClient

EMPTY = np.empty(0, np.int32)


@dataclass(eq=False)
class Req:
    """A request with the attributes that are read and written."""

    rid: str
    origin_input_ids: list[int]
    extra_key: str | None = None
    output_ids: list[int] = field(default_factory=list)
    fill_ids: list[int] = field(default_factory=list)
    prefix_indices: Slots = field(default_factory=lambda: EMPTY)
    req_pool_idx: int = -1
    last_node: Any = None
    kv_allocated_len: int = 0  # tokens that its row has slots for


class Scheduler:
    """Admits, computes in chunks, decodes, finishes; checks the content of all that it reads."""

    def __init__(self, num_tokens: int = 64, page_size: int = 1, num_host_tokens: int = 0, **settings: Any) -> None:
        self.client = SimulatedClient(num_tokens // page_size, num_host_tokens // page_size)
        config = new_config(
            num_tokens,
            page_size,
            hicache_ratio=num_host_tokens / num_tokens,
            prefetch_threshold=page_size,
            **{"transfer_client": "inline", "load_policy": "always", **settings},
        )
        self.manager = new_manager(config, client=self.client)
        self.pool = ReqToTokenPool(8, 256)
        self.cache = HiRadixCache(self.manager, self.pool, load_back_threshold=1)
        self.allocator = self.cache.token_to_kv_pool_allocator
        self.page_size = page_size

    def load_ahead(self, tokens: list[int]) -> tuple[Slots, Any]:
        """Serve a prompt, push it out to the host, and begin to load it by a cache that overlaps loads with steps."""
        self.serve(tokens, [1])
        self.client.land_all()
        self.cache.evict(len(tokens))
        self.cache = HiRadixCache(self.manager, self.pool, overlap_loads=True)
        return self.cache.init_load_back(self.cache.match_prefix(tokens).last_host_node, len(tokens))

    def _mark(self, req: Req, tokens: list[int], slot: int, end: int) -> None:
        """The content of the page that ends with the token before `end`."""
        if end % self.page_size == 0:
            self.client.gpu[slot // self.page_size] = (req.extra_key, tuple(tokens[:end]))

    def check(self, req: Req, tokens: list[int], slots: Slots) -> None:
        """Whole pages that are read hold what they should."""
        for end in range(self.page_size, len(slots) + 1, self.page_size):
            page = int(slots[end - 1]) // self.page_size
            assert self.client.gpu[page] == (req.extra_key, tuple(tokens[:end])), "wrong KV served"

    def alloc(self, slots: Slots, num_tokens: int, need: int) -> Slots | None:
        """Slots for `need` more tokens, evicting whole nodes where they are short."""
        got = self.allocator.extend(slots, num_tokens, need)
        if got is None:
            missing = -(-need // self.page_size) * self.page_size - self.allocator.available_size()
            self.cache.evict(missing)
            got = self.allocator.extend(slots, num_tokens, need)
        return got

    def admit(self, req: Req) -> bool:
        """Match all but the last token, lock, load back, take slots for the prompt; False leaves nothing behind."""
        tokens = [*req.origin_input_ids, *req.output_ids]
        rows = self.pool.alloc(1)
        if rows is None:
            return False
        match = self.cache.match_prefix(RadixKey(tokens[:-1], req.extra_key))
        slots, node = match.device_indices, match.last_device_node
        self.cache.inc_lock_ref(node)
        if match.host_hit_length:
            self.client.auto = True
            loaded, deeper = self.cache.init_load_back(match.last_host_node, match.host_hit_length)
            self.client.auto = False
            if len(loaded):
                self.cache.inc_lock_ref(deeper)
                self.cache.dec_lock_ref(node)
                slots, node = np.concatenate([slots, loaded]), deeper
        self.check(req, tokens, slots)
        whole = self.alloc(slots, len(slots), len(tokens) - len(slots))
        if whole is None:
            self.cache.dec_lock_ref(node)
            self.pool.free(rows)
            return False
        req.req_pool_idx, req.last_node, req.prefix_indices = rows[0], node, slots
        req.fill_ids, req.kv_allocated_len = tokens[: len(slots)], len(whole)
        self.pool.write((rows[0], slice(len(whole))), whole)
        return True

    def row(self, req: Req) -> Slots:
        """Its slots."""
        return self.pool.req_to_token[req.req_pool_idx, : req.kv_allocated_len]

    def compute(self, req: Req, num_tokens: int) -> None:
        """Fill the slots of its next tokens."""
        tokens = [*req.origin_input_ids, *req.output_ids]
        self.check(req, tokens, self.row(req)[: len(req.fill_ids) // self.page_size * self.page_size])
        for end in range(len(req.fill_ids) + 1, len(req.fill_ids) + num_tokens + 1):
            self._mark(req, tokens, int(self.row(req)[end - 1]), end)
        req.fill_ids = tokens[: len(req.fill_ids) + num_tokens]

    def keep(self, req: Req, *, chunked: bool = False) -> None:
        """The request goes on: its scheduler takes `prefix_indices` for the slots of all that has been computed."""
        self.cache.cache_unfinished_req(req, chunked=chunked)
        assert self.row(req)[: len(req.fill_ids)].tolist() == req.prefix_indices.tolist(), "it would compute them again"

    def decode(self, req: Req, token: int) -> bool:
        """Sample a token after the one before has been computed; False where there is no slot for that."""
        tokens = [*req.origin_input_ids, *req.output_ids]
        missing = len(tokens) - len(req.fill_ids)
        if missing:
            slots = self.alloc(self.row(req), len(req.fill_ids), missing)
            if slots is None:
                return False
            req.kv_allocated_len = max(req.kv_allocated_len, len(slots))
            self.pool.write((req.req_pool_idx, slice(len(slots))), slots)
            self.compute(req, missing)
        req.output_ids.append(token)
        return True

    def serve(self, tokens: list[int], answer: list[int], chunk: int = 100, extra_key: str | None = None) -> int:
        """A whole request; returns the tokens that it found, or -1 where there was no room."""
        req = Req("r", list(tokens), extra_key)
        if not self.admit(req):
            return -1
        num_found = len(req.prefix_indices)
        while len(req.fill_ids) < len(tokens):
            self.compute(req, min(chunk, len(tokens) - len(req.fill_ids)))
            if len(req.fill_ids) < len(tokens):
                self.keep(req, chunked=True)
        self.keep(req)
        for token in answer:
            assert self.decode(req, token)
        self.cache.cache_finished_req(req)
        return num_found

    def close(self) -> None:
        """Nothing is left that is not cached or free."""
        self.client.land_all()
        self.manager.check_invariants()
        gpu = self.manager.blocks.view.tier_stats()
        assert gpu.num_callers == gpu.num_protected == gpu.num_private == gpu.num_in_flight == 0, gpu
        assert self.pool.available_size() == self.pool.size
        self.manager.close()
