"""SGLang's `HiRadixCache` of August 2025, by its method names, arguments and returns, over ours.

Source: behaviour of SGLang 0.4.10.post2. docs/adapters/sglang.md says what is covered and what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from fastdeploy_cache.adapters.repeated_lists import RepeatedLists
from fastdeploy_cache.adapters.sglang.config import new_config, new_manager
from fastdeploy_cache.adapters.sglang.loads import Loads
from fastdeploy_cache.adapters.sglang.nodes import Node, RadixKey, as_key, new_request, request_from
from fastdeploy_cache.adapters.sglang.slot_pools import ReqToTokenPool, TokenToKVPoolAllocator
from fastdeploy_cache.adapters.slots import pages
from fastdeploy_cache.adapters.slots.pages import Integers, Slots, as_array, as_integers, pages_of, slots_of
from fastdeploy_cache.books.block_hash import TOKEN_BYTES
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.books.tokens import PackedTokens, pack
from fastdeploy_cache.errors import ConfigError, RequestError
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.match import Prefetch

__all__ = ["HiRadixCache", "MatchResult", "RadixKey", "ReqToTokenPool", "new_config", "new_manager"]


class MatchResult(NamedTuple):
    """What `match_prefix` found: slots on the GPU, and nodes at the end of what is there and of what is anywhere."""

    device_indices: Any  # int32 array, or int64 tensor
    last_device_node: Node
    last_host_node: Node
    host_hit_length: int  # tokens behind the slots that are in the CPU tier only


class Req(Protocol):
    """What is read and written of a request.

    Attributes:
        req_pool_idx: its row in the request-to-token pool, which holds the slots of all its tokens.
        origin_input_ids, output_ids: its tokens.
        fill_ids: those of them that have been computed (`cache_unfinished_req`).
        kv_allocated_len: tokens that its row has slots for; may be missing.
        prefix_indices: the slots of what it has computed, or got from the cache, when it was last matched or cached.
        last_node: the node that is locked for it; its slots up to there are the cache's, and its tokens the node's.
        extra_key: parts its prefixes from others'; may be missing.
    """

    rid: str
    req_pool_idx: int
    origin_input_ids: Sequence[int]
    output_ids: Sequence[int]
    fill_ids: Sequence[int]
    prefix_indices: Any
    last_node: Node


class HiRadixCache:
    """Prefixes as slots of tokens. One thread at a time, as a scheduler has; the ranks move bytes meanwhile.

    Nodes are places in the prefix tree, by the tokens up to them; a place may be locked as long as it is cached.
    """

    device = "cpu"  # where slots are; their pages are where the manager's blocks are
    hicache_storage_pass_prefix_keys = False  # storage gets the hashes from here

    def __init__(
        self,
        manager: PrefixCacheManager,
        req_to_token_pool: ReqToTokenPool | None = None,
        *,
        load_back_threshold: int = 10,
        overlap_loads: bool = False,
        as_tensors: bool = False,
    ) -> None:
        """`manager` is of `new_manager`. `as_tensors`: slots are given as CPU tensors of PyTorch, int64.

        `load_back_threshold`: fewer tokens in the CPU tier than these are computed. `overlap_loads`: `init_load_back`
        returns at once; workers wait for each layer (`layer_progress`), and `loading_check` tells what has failed.

        Raises:
            LayoutError: PyTorch is wanted, but missing.
        """
        self.manager, self.page_size = manager, manager.config.block_size
        self.disable = not manager.config.enable_prefix_caching
        self._given = pages.as_int64_tensor if as_tensors else as_array
        self._none = self._given(slots_of([], 1))
        self.token_to_kv_pool_allocator = TokenToKVPoolAllocator(manager, as_tensors=as_tensors)
        self.req_to_token_pool, self.load_back_threshold = req_to_token_pool, load_back_threshold
        self.loads = Loads(manager, overlap=overlap_loads)
        self.ready_to_load_host_cache = self.loads.take_started
        # once for each step: copies down, storage and its answers need no calls here
        self.loading_check = self.check_hicache_events = self.loads.check
        self._locks: dict[Node, list[PinnedPrefix]] = {}
        self._prefetches: dict[str, tuple[Request, Prefetch]] = {}
        self._repeated = RepeatedLists()
        self.root_node = Node.root(manager)  # its `children` are the tree at the moment of the look

    # -- sizes

    def evictable_size(self) -> int:
        """Cached tokens on the GPU that are not locked."""
        return self.manager.blocks.view.tier_stats().num_evictable * self.page_size

    def protected_size(self) -> int:
        """Cached tokens on the GPU that are locked, or are being copied."""
        return self.manager.blocks.view.tier_stats().num_protected * self.page_size

    def total_size(self) -> int:
        """Cached tokens on the GPU."""
        return self.manager.blocks.view.tier_stats().num_cached * self.page_size

    # -- match and insert

    def match_prefix(self, key: RadixKey | Sequence[int], **others: Any) -> MatchResult:
        """The longest cached prefix of whole pages. It counts as used now; the node in which it ends is split there.

        `others` are what callers name beside the key (`rid`, `req`, `cow_mamba`): no result depends on them. With a
        `rid`, a list that comes before each step is packed once. Nothing is locked: `inc_lock_ref(last_device_node)`
        before anything else is allocated or evicted.
        """
        key, rid = as_key(key), others.get("rid") or getattr(others.get("req"), "rid", None)
        return self._match(new_request(key, self.page_size, self._repeated.packed(rid, key.token_ids)))

    def _match(self, request: Request | None) -> MatchResult:
        if request is None:
            return MatchResult(self._none, self.root_node, self.root_node, 0)
        found = self.manager.blocks.lookup(request, split=True, hashes=True)
        return MatchResult(
            self._given(slots_of(found.block_ids, self.page_size)),
            self._node(request, len(found.block_ids), found.gpu_hash),
            self._node(request, found.num_blocks, found.last_hash),
            found.num_cpu_blocks * self.page_size,
        )

    def _node(self, request: Request, num_pages: int, name: bytes) -> Node:
        return Node(self.manager, request, num_pages, name) if num_pages else self.root_node

    def insert(self, key: RadixKey | Sequence[int], value: Integers, chunked: bool = False) -> int:
        """The key's tokens are computed, in the slots `value`: whole pages of them are cached now.

        Returns how many leading tokens were on the GPU before: of these the cache keeps its own slots, and those of
        `value` that are others stay the caller's, to be freed. What was in the CPU tier only adopts the caller's slots
        and is not counted. `chunked`: the request goes on, and this is no use of what it inserts.

        Raises:
            RequestError: `value` is not whole pages, or shorter than the key. BlockOwnerError: a slot is neither the
            caller's nor the cache's own at that place. Nothing was changed.
        """
        request = new_request(as_key(key), self.page_size)
        if request is None:
            return 0
        if len(value) < request.num_tokens:
            raise RequestError(f"{len(value)} slots for {request.num_tokens} tokens; give one for each")
        return self._insert(request, pages_of(value[: request.num_tokens], self.page_size), 0, used=not chunked)[0]

    def _insert(self, request: Request, pages: list[int], num_adopted: int, *, used: bool) -> tuple[int, int]:
        """Insert a request's first pages, of which `num_adopted` are the cache's by its own account. Returns the tokens
        up to which the cache had pages, and those up to which it has them now.

        Both are what was adopted where the cache has forgotten that prefix, or keeps nothing: the rest is the caller's.
        """
        size, known = self.page_size, self.manager.blocks.lookup(request, touch=False).block_ids
        if known[:num_adopted] != pages[:num_adopted]:
            return num_adopted * size, num_adopted * size
        num_own = next((i for i, (a, b) in enumerate(zip(pages, known, strict=False)) if a != b), len(known))
        inserted = self.manager.blocks.insert(request, pages[num_own:], first_block=num_own, used=used)
        if inserted.num_blocks < len(pages):
            return num_own * size, num_own * size
        return (num_own + len(inserted.duplicate_ids)) * size, inserted.num_blocks * size

    # -- locks and eviction

    def inc_lock_ref(self, node: Node) -> int:
        """Keep a node and all above it where they are; returns the change of `evictable_size`.

        Raises:
            RequestError: it is not cached any more.
        """
        if node.is_root:
            return 0
        before = self.evictable_size()
        pinned = self.manager.blocks.pin(node.request, node.num_pages)
        if pinned.num_blocks < node.num_pages:
            self.manager.blocks.unpin(pinned)
            raise RequestError(
                f"a node at {node.num_tokens} tokens is cached up to "
                f"{pinned.num_blocks * self.page_size} only; lock what match_prefix returns before it can be evicted"
            )
        self._locks.setdefault(node, []).append(pinned)
        return self.evictable_size() - before

    def dec_lock_ref(self, node: Node) -> int:
        """The reverse; returns the change of `evictable_size`.

        Raises:
            RequestError: it is not locked.
        """
        if node.is_root:
            return 0
        if node not in self._locks:
            raise RequestError(f"a node at {node.num_tokens} tokens is not locked; unlock each once")
        before, pins = self.evictable_size(), self._locks[node]
        self.manager.blocks.unpin(pins.pop())
        if not pins:
            del self._locks[node]
        return self.evictable_size() - before

    def lock_ref(self, node: Node) -> int:
        """How often a node itself is locked."""
        return len(self._locks[node]) if node in self._locks else 0

    def evict(self, num_tokens: int) -> int:
        """Free whole nodes that are not locked, in the order of the eviction policy, until `num_tokens` or more slots
        are free; returns how many. What has a copy stays cached in the CPU tier."""
        pages = self.manager.blocks.evict_runs(-(-num_tokens // self.page_size))
        self.manager.blocks.free(pages)
        return len(pages) * self.page_size

    def evict_host(self, num_tokens: int) -> int:
        """Free so many tokens of the CPU tier, or as many as can go."""
        return self.manager.blocks.evict(-(-num_tokens // self.page_size), CPU) * self.page_size

    def get_height(self, node: Node) -> int:
        """How many nodes lie between the root and a node, itself included: as far as it is cached."""
        return len(node.path())

    def take_events(self) -> list[object]:
        """There are none."""
        return []

    def reset(self) -> None:
        """Forget all prefixes and prefetches. What requests hold, locked prefixes too, stays theirs until they end."""
        self.loads.end_all()
        for req_id in list(self._prefetches):
            self.terminate_prefetch(req_id)
        self.manager.reset()

    # -- load back

    def init_load_back(self, last_node: Node, host_hit_length: int, mem_quota: int | None = None) -> tuple[Any, Node]:
        """Bring what lies between the GPU and `last_node` back to the GPU: all of it or nothing.

        Returns the slots behind those that the caller has, which end `host_hit_length` tokens before `last_node`, and
        the deepest node on the GPU: of what was loaded, is being loaded (`overlap_loads`), or has come by another
        request's load since the caller matched. Nothing is loaded for fewer than `load_back_threshold` tokens, for more
        than `mem_quota`, or without room.
        """
        if last_node.is_root:
            return self._none, last_node
        first = last_node.num_pages - host_hit_length // self.page_size
        found, resident = self.manager.blocks.lookup(last_node.request, hashes=True), last_node
        if len(found.block_ids) < last_node.num_pages:
            resident = self._node(last_node.request, len(found.block_ids), found.gpu_hash)
        num_tokens = last_node.num_tokens - resident.num_tokens
        wanted = self.load_back_threshold <= num_tokens and host_hit_length
        is_within = mem_quota is None or num_tokens <= mem_quota
        loading = self.loads.start(last_node) if wanted and is_within else None
        if loading is None:
            return self._given(slots_of(found.block_ids[first : resident.num_pages], self.page_size)), resident
        here = self.manager.blocks.lookup(last_node.request).block_ids[first : last_node.num_pages - len(loading)]
        return self._given(slots_of([*here, *loading], self.page_size)), last_node

    # -- storage

    def prefetch_from_storage(
        self,
        req_id: str,
        last_host_node: Node,
        new_input_tokens: Sequence[int],
        last_hash: str | None = None,  # noqa: ARG002 (hashes follow from tokens here)
        prefix_keys: Sequence[str] | None = None,  # noqa: ARG002
    ) -> None:
        """Read what storage has behind a node into the CPU tier, for a queued request. Fewer tokens than the threshold
        are not asked for, nor what finds no room."""
        tokens = last_host_node.tokens + pack(req_id, new_input_tokens)
        if not tokens:
            return
        self.terminate_prefetch(req_id)
        namespace = "" if last_host_node.is_root else last_host_node.request.namespace
        with_one_more = PackedTokens(tokens + bytes(TOKEN_BYTES))  # a prefetch leaves the last token to compute
        request = Request(request_id=req_id, prompt_token_ids=with_one_more, namespace=namespace)
        self._prefetches[req_id] = request, self.manager.prefetch(request)

    def check_prefetch_progress(self, req_id: str) -> bool:
        """Whether the request need not wait any more, by the stop policy; what has come is in the CPU tier then."""
        _, prefetch = self._prefetches.get(req_id, (None, None))
        if prefetch is not None and not prefetch.ready:
            return False
        self.terminate_prefetch(req_id)
        return True

    def terminate_prefetch(self, req_id: str) -> None:
        """Revoke: what has not come is not wanted any more. Nothing for an unknown request."""
        request, _ = self._prefetches.pop(req_id, (None, None))
        if request is not None:
            self.manager.end_prefetch(request)

    def release_aborted_request(self, rid: str) -> None:
        """See `terminate_prefetch`."""
        self.terminate_prefetch(rid)

    # -- requests

    def cache_finished_req(self, req: Req, is_insert: bool = True) -> None:
        """The request is over: its computed tokens are cached, its other slots and its row are free, its lock goes.

        Computed is all but its last output. `is_insert` False: what it has computed is worth nothing; all is free. Its
        row has slots for `req.kv_allocated_len` tokens; without that attribute, for those computed.
        """
        pool, size = self._checked(req), self.page_size
        parts = (req.origin_input_ids, req.output_ids[:-1])
        allocated = self._allocated(req, int(getattr(req, "kv_allocated_len", sum(map(len, parts)))))
        num_known = num_cached = num_adopted = req.last_node.num_tokens
        request = request_from(req.last_node, parts, getattr(req, "extra_key", None), size) if is_insert else None
        if request is not None:
            pages = pages_of(allocated[: request.num_tokens], size)
            num_known, num_cached = self._insert(request, pages, num_known // size, used=True)
        self._free(allocated[num_adopted:num_known])
        self._free(allocated[max(num_known, num_cached) :])
        pool.free(req.req_pool_idx)
        self.dec_lock_ref(req.last_node)

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:  # noqa: ARG002
        """The request goes on: what it has computed is cached; its row, `prefix_indices` and `last_node` point there.

        `prefix_indices` are all that it has computed, also what is no whole page yet: there the next chunk begins. A
        request is one use, at its end, `chunked` or not. Its own duplicates are freed after its row has been rewritten:
        call it between steps. Where nothing of it is cached, or the cache has forgotten its prefix, it keeps what it
        has.
        """
        pool, num_adopted = self._checked(req), req.last_node.num_tokens
        slots = pool.row(req.req_pool_idx, len(req.fill_ids))
        request = request_from(req.last_node, (req.fill_ids,), getattr(req, "extra_key", None), self.page_size)
        req.prefix_indices = self._given(slots)
        if request is None:
            return
        pages = pages_of(slots[: request.num_tokens], self.page_size)
        num_known, num_cached = self._insert(request, pages, num_adopted // self.page_size, used=False)
        if num_cached <= num_adopted and num_known <= num_adopted:
            return
        match = self._match(request)
        self.inc_lock_ref(match.last_device_node)
        self.dec_lock_ref(req.last_node)
        cached = as_integers(match.device_indices).astype(np.int32)
        pool.write((req.req_pool_idx, slice(len(cached))), cached)
        self._free(slots[num_adopted:num_known])
        req.last_node = match.last_device_node
        req.prefix_indices = self._given(np.concatenate([cached, slots[len(cached) :]]))

    def _checked(self, req: Req) -> ReqToTokenPool:
        """Its row is in use, its node is locked, and what was loading for it has ended: else nothing is changed."""
        pool = self._pool()
        pool.check(req.req_pool_idx)
        if not req.last_node.is_root and req.last_node not in self._locks:
            raise RequestError(f"request {req.rid!r} holds no lock; finish each once")
        self.loads.settle(req.last_node)
        return pool

    def _pool(self) -> ReqToTokenPool:
        if self.req_to_token_pool is None:
            raise ConfigError("this cache has no ReqToTokenPool; give it one, or use match_prefix and insert")
        return self.req_to_token_pool

    def _allocated(self, req: Req, num_tokens: int) -> Slots:
        """The slots of its tokens, with those that it has in its last page beyond them."""
        row = self._pool().row(req.req_pool_idx, -(-num_tokens // self.page_size) * self.page_size)
        return slots_of(row[:: self.page_size] // self.page_size, self.page_size)

    def _free(self, slots: Slots) -> None:
        if len(slots):
            self.token_to_kv_pool_allocator.free(slots)

    def pretty_print(self) -> str:
        """Print the tree and return the text: a line for each run, with its tokens and where it is."""
        lines, depths = list[str](), dict[bytes, int]()
        for run in self.manager.blocks.view.runs():
            depth = depths[run.last_hash] = depths.get(run.parent_hash, -1) + 1
            held = f" locked={run.num_held * self.page_size}" if run.num_held else ""
            where = f"gpu={len(run.block_ids)} cpu={len(run.cpu_block_ids)} pages"
            lines.append(f"{'  ' * depth}{run.token_ids[:8].tolist()} x{run.token_ids.size} {where}{held}")
        text = "\n".join(lines)
        print(text)
        return text
