"""The radix prefix cache of mini-sglang, over one `PrefixCacheManager`: its tree, its blocks, its books.

A page is a block; slots are positions of tokens: block b of `page_size` p is slots b*p to b*p + p - 1. Lengths are in
tokens. Tokens and slots may be lists, integer arrays or CPU tensors; what is returned is int32 and owns its memory: an
array, or with `as_tensors` a CPU tensor of PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastdeploy_cache.adapters.slots.pages import (
    Given,
    Integers,
    as_array,
    as_int32_tensor,
    as_integers,
    pages_of,
    slots_of,
)
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.tokens import PackedTokens, pack_plain
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError, OutOfBlocksError, RequestError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.policies.whole_runs import whole_runs
from fastdeploy_cache.request import Request


class SizeInfo(NamedTuple):
    """Cached tokens: those that may be evicted, and those that a lock protects."""

    evictable_size: int
    protected_size: int

    @property
    def total_size(self) -> int:
        """All cached tokens."""
        return self.evictable_size + self.protected_size


@dataclass(frozen=True, eq=False)
class RadixCacheHandle:
    """The first `cached_len` tokens of a sequence, found or inserted. Its slots are safe to read only while locked."""

    cached_len: int
    page_ids: list[int] = field(repr=False)
    request: Request | None = field(repr=False)  # names the tokens; None: there are none, it is the root's
    given: Given = field(default=as_array, repr=False)

    def get_matched_indices(self) -> Any:
        """The slots of these tokens: int32 [cached_len]."""
        return self.given(slots_of(self.page_ids, self.cached_len // len(self.page_ids) if self.page_ids else 1))


class MatchResult(NamedTuple):
    """What `match_prefix` found."""

    cuda_handle: RadixCacheHandle


class InsertResult(NamedTuple):
    """`cached_len` leading tokens were cached before: the caller frees what it has of them."""

    cached_len: int
    handle: RadixCacheHandle


def new_manager(num_pages: int, page_size: int = 1, **settings: Any) -> PrefixCacheManager:
    """A manager whose runs are mini-sglang's nodes: a node ends where an insert ended, and is evicted whole.

    Without a `layout` it moves no bytes and starts no process. `settings`: further ones of `CacheConfig`. Close it.

    Raises:
        ConfigError: an impossible setting, or an eviction policy.
    """
    if "eviction_policy" in settings:
        raise ConfigError(f"eviction_policy is {settings['eviction_policy']!r}; leave it out, nodes go by LRU here")
    config = CacheConfig(**{"transfer_client": "inline", **settings}, block_size=page_size, num_gpu_blocks=num_pages)
    config.check_uniform("the radix cache of mini-sglang")
    return PrefixCacheManager(config, policy=whole_runs("lru", SYSTEM_CLOCK.now))


class RadixPrefixCache:
    """Finds, locks, inserts and evicts prefixes. One thread at a time; the manager may have other users.

    Over a manager that `new_manager` has not made, nodes are the runs that its own policy keeps.
    """

    def __init__(self, manager: PrefixCacheManager, *, as_tensors: bool = False) -> None:
        """The caller closes the manager. `as_tensors`: slots are given as CPU tensors of PyTorch.

        Raises:
            LayoutError: PyTorch is wanted, but missing.
        """
        self.manager, self.check_integrity = manager, manager.check_invariants
        self.reset = manager.reset  # what is locked stays as it is until it is unlocked, but is not found any more
        self.given: Given = as_int32_tensor if as_tensors else as_array
        self.given(slots_of([], 1))
        self.page_size = manager.config.block_size
        self._locks: dict[RadixCacheHandle, list[PinnedPrefix]] = {}

    def match_prefix(self, input_ids: Integers) -> MatchResult:
        """The longest cached prefix, in whole pages. It is used now; a node that the match ends in is cut there.

        Raises:
            RequestError: no flat list of token ids.
        """
        request = self._request(input_ids)
        return MatchResult(self._handle(request, self._lookup(request, used=True)))

    def lock_handle(self, handle: RadixCacheHandle | None, unlock: bool = False) -> None:
        """Keep the handle's slots as they are, until it has been unlocked as often.

        The root's handle has none, and None is no handle: nothing is done.

        Raises:
            RequestError: some of it is not cached any more (match again), or an unlock without a lock.
        """
        if handle is None or handle.request is None:
            return
        if unlock:
            pins = self._locks.get(handle)
            if not pins:
                raise RequestError(f"unlock of {handle.cached_len} tokens that this handle has not locked")
            self.manager.blocks.unpin(pins.pop())
            if not pins:
                del self._locks[handle]
            return
        pinned = self.manager.blocks.pin(handle.request, len(handle.page_ids))
        if pinned.block_ids != handle.page_ids:
            self.manager.blocks.unpin(pinned)
            raise RequestError(f"lock of {handle.cached_len} tokens, but not all are cached any more; match again")
        self._locks.setdefault(handle, []).append(pinned)

    def insert_prefix(self, input_ids: Integers, indices: Integers, *, lock: bool = False) -> InsertResult:
        """The KV of these tokens lies in these slots: their whole pages are cached now, and evictable until locked.

        What was cached before keeps the slots that it had; of the rest the caller's pages become the cache's. Pages
        are had from `manager.blocks.allocate`. With `lock` the handle is locked in the same step: the request goes on,
        and does not count as a use yet.

        Raises:
            RequestError: not as many slots as tokens, or slots that are no pages.
            BlockOwnerError: a page that was to be cached is not the caller's. Nothing was changed.
        """
        request = self._request(input_ids)
        num_tokens = request.num_tokens if request is not None else 0
        page_ids = pages_of(indices, self.page_size)
        if len(indices) != num_tokens:
            raise RequestError(f"insert of {num_tokens} tokens in {len(indices)} slots; give a slot for each token")
        del page_ids[num_tokens // self.page_size :]
        known = self._lookup(request)
        num_known = len(known)
        if request is None or num_known == len(page_ids):
            handle = self._handle(request, self._lookup(request, used=True))
            if lock:
                self.lock_handle(handle)
            return InsertResult(handle.cached_len, handle)
        own = page_ids[num_known:]
        inserted = self.manager.blocks.insert(request, own, first_block=num_known, pin=True, used=not lock)
        if inserted.pinned is None:
            raise MemoryError("the pages are cached; there was no memory to lock them")
        handle = self._handle(request, inserted.pinned.block_ids)
        if lock and handle.request is not None:
            self._locks[handle] = [inserted.pinned]
        else:
            self.manager.blocks.unpin(inserted.pinned)
        num_cached = min(num_known + len(inserted.duplicate_ids), inserted.num_blocks)
        return InsertResult(num_cached * self.page_size, handle)

    def evict(self, size: int) -> Any:
        """Evict `size` tokens or more: whole nodes, those used longest ago first.

        Returns their slots, of each node from its first token on; the pages are the caller's now
        (`manager.blocks.free`).

        Raises:
            OutOfBlocksError: more than can be evicted (an assertion in the original); nothing was changed.
        """
        if size < 0:
            raise RequestError(f"evict of {size} tokens; give 0 or more")
        missing = size - self.size_info.evictable_size
        if missing > 0:
            raise OutOfBlocksError(-(-missing // self.page_size), 0)
        return self.given(slots_of(self.manager.blocks.evict_runs(-(-size // self.page_size)), self.page_size))

    @property
    def size_info(self) -> SizeInfo:
        """Cached tokens on the GPU."""
        gpu = self.manager.blocks.view.tier_stats()
        return SizeInfo(gpu.num_evictable * self.page_size, gpu.num_protected * self.page_size)

    def is_cached(self, handle: RadixCacheHandle) -> bool:
        """Whether the handle's tokens are still found in its slots: not after a reset, even if it is locked."""
        return self._lookup(handle.request)[: len(handle.page_ids)] == handle.page_ids

    # -- steps

    @staticmethod
    def _request(input_ids: Integers) -> Request | None:
        packed = pack_plain(input_ids)  # plain ones are packed as they are
        tokens = PackedTokens(packed) if packed is not None else as_integers(input_ids)
        return Request(request_id="names tokens", prompt_token_ids=tokens) if len(input_ids) else None

    def _lookup(self, request: Request | None, *, used: bool = False) -> list[int]:
        return self.manager.blocks.lookup(request, touch=used, split=used).block_ids if request is not None else []

    def _handle(self, request: Request | None, page_ids: list[int]) -> RadixCacheHandle:
        num_tokens = len(page_ids) * self.page_size
        return RadixCacheHandle(num_tokens, page_ids, request if page_ids else None, self.given)


def find_first_diff_pos(tensor1: Integers, tensor2: Integers) -> int:
    """The first position at which two sequences differ; where one begins with the other, the shorter one's length."""
    ours, theirs = as_integers(tensor1), as_integers(tensor2)
    num_common = min(len(ours), len(theirs))
    differ = ours[:num_common] != theirs[:num_common]
    return int(differ.argmax()) if differ.any() else num_common
