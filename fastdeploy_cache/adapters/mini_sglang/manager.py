"""What mini-sglang has above its prefix cache: pages for requests, a page table, sizes, the tree as text."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from fastdeploy_cache.adapters.mini_sglang.radix_cache import MatchResult, RadixCacheHandle, RadixPrefixCache
from fastdeploy_cache.adapters.slots.pages import Integers, Slots, as_integers, pages_of, slots_of
from fastdeploy_cache.books.run_view import RunView
from fastdeploy_cache.errors import ConfigError, RequestError

logger = logging.getLogger(__name__)

_CLIP = 30


class Req(Protocol):
    """What is needed of the engine's requests. KV of the first `cached_len` tokens is in its row `table_idx` of the
    page table; pages up to `device_len` tokens are wanted."""

    input_ids: Any  # `Integers`, or a CPU tensor
    table_idx: int
    cached_len: int
    device_len: int
    cache_handle: RadixCacheHandle


class PendingReq(Protocol):
    """A request that waits."""

    input_ids: Any


class CacheManager:
    """Matches, allocates and caches whole requests. One thread at a time."""

    def __init__(self, prefix_cache: RadixPrefixCache, page_table: np.ndarray[Any, Any]) -> None:
        """`page_table`: int32 [requests, tokens], slots; a CPU tensor is written in place.

        Raises:
            ConfigError: another type or shape.
        """
        table = np.asarray(page_table)
        if table.dtype != np.int32 or table.ndim != 2:
            raise ConfigError(f"page table is {table.dtype} {list(table.shape)}; use `create_page_table`")
        self.prefix_cache, self.reset = prefix_cache, prefix_cache.reset
        self.page_table = table
        self.page_size = prefix_cache.page_size
        self._manager = prefix_cache.manager
        self._freed: list[int] | None = None  # pages, inside a lazy region

    @property
    def available_size(self) -> int:
        """Tokens for which pages are free or can be evicted."""
        return self._manager.blocks.view.tier_stats().num_available * self.page_size

    def match_req(self, req: PendingReq) -> MatchResult:
        """The longest cached prefix of all tokens but the last, which has to be computed.

        Raises:
            RequestError: it has no tokens.
        """
        if not len(req.input_ids):
            raise RequestError("match of a request without tokens; give it at least one")
        return self.prefix_cache.match_prefix(req.input_ids[:-1])

    def lock(self, handle: RadixCacheHandle | None) -> None:
        """See `RadixPrefixCache.lock_handle`."""
        self.prefix_cache.lock_handle(handle)

    def unlock(self, handle: RadixCacheHandle | None) -> None:
        """The reverse of `lock`."""
        self.prefix_cache.lock_handle(handle, unlock=True)

    # -- pages

    def allocate(self, needed_len: int) -> Any:
        """The slots of as many pages as so many tokens need. Evicts just what is missing, ends of nodes first.

        Raises:
            OutOfBlocksError: there is no room; nothing was changed.
        """
        return self.prefix_cache.given(self._allocated(needed_len))

    def _allocated(self, num_tokens: int) -> Slots:
        return slots_of(self._manager.blocks.allocate(-(-num_tokens // self.page_size)), self.page_size)

    def allocate_paged(self, reqs: Sequence[Req]) -> None:
        """Write new pages into the table for the tokens [cached_len, device_len) of all requests, or of none.

        Raises:
            OutOfBlocksError: there is no room; nothing was changed.
            RequestError: the table has no such row, or is too narrow.
        """
        parts, (num_rows, width) = [], self.page_table.shape
        for req in reqs:
            first, end = (-(-n // self.page_size) * self.page_size for n in (req.cached_len, req.device_len))
            if not (0 <= req.table_idx < num_rows and 0 <= first <= end <= width):
                raise RequestError(
                    f"row {req.table_idx}, tokens {req.cached_len} to {req.device_len}, pages of {self.page_size}; "
                    f"the page table is {num_rows} x {width}"
                )
            parts.append((req.table_idx, first, end))
        slots = self._allocated(sum(end - first for _, first, end in parts))
        position = 0
        for row, first, end in parts:
            self.page_table[row, first:end] = slots[position : position + end - first]
            position += end - first

    def free(self, slots: Integers) -> None:
        """Give pages back; of the last one `slots` may have a part only.

        Raises:
            BlockOwnerError: one is cached, or free already. Nothing was changed.
        """
        page_ids = pages_of(slots, self.page_size)
        if self._freed is None:
            self._manager.blocks.free(page_ids)
        else:
            self._freed += page_ids

    @contextmanager
    def lazy_free_region(self) -> Iterator[None]:
        """What is freed inside goes back at its end, all at once, also where it ends by an error. An inner region is
        part of the outer one. `BlockOwnerError` comes at the end, too, and then nothing was given back."""
        if self._freed is not None:
            yield
            return
        self._freed = []
        try:
            yield
        finally:
            freed, self._freed = self._freed, None
            self._manager.blocks.free(freed)

    # -- requests

    def cache_req(self, req: Req, *, finished: bool) -> None:
        """Cache the whole pages of the first `cached_len` tokens::

            [0, old handle)          locked since the match
            [old handle, cached)     cached by somebody else meanwhile: our pages are freed
            [cached, new handle)     ours until now, cached from now on
            [new handle, cached_len) part of a page: ours; freed when finished

        A request that goes on reads the cached pages instead of those that were freed: its table is changed first.
        Its new handle is locked. After a reset nothing is cached of the requests from before.
        """
        old, row = req.cache_handle, self.page_table[req.table_idx, : req.cached_len]
        tokens = req.input_ids[: req.cached_len]
        if finished:
            self.free_and_cache_finished_req(old, tokens, row)
        elif self.prefix_cache.is_cached(old):
            own = row.copy()
            cached_len, new = self.prefix_cache.insert_prefix(tokens, own, lock=True)
            self.unlock(old)
            req.cache_handle = new
            row[: new.cached_len] = new.get_matched_indices()
            self.free(own[old.cached_len : cached_len])

    def free_and_cache_finished_req(self, old_handle: RadixCacheHandle, input_ids: Integers, indices: Integers) -> None:
        """The tokens lie in these slots, and nobody computes on them any more: cache what is whole, free the rest,
        unlock the handle."""
        own = as_integers(indices)
        gone = own[old_handle.cached_len :]
        if self.prefix_cache.is_cached(old_handle):
            cached_len, new = self.prefix_cache.insert_prefix(input_ids, own)
            gone = np.concatenate((own[old_handle.cached_len : cached_len], own[new.cached_len :]))
        self.free(gone)
        self.unlock(old_handle)

    def check_integrity(self, num_held_pages: int = 0) -> None:
        """Raise `AssertionError` unless free and cached pages, and those that requests hold, are all: none is lost."""
        self.prefix_cache.check_integrity()
        gpu = self._manager.blocks.view.tier_stats()
        if gpu.num_free + gpu.num_cached + num_held_pages != gpu.num_blocks:
            raise AssertionError(
                f"{gpu.num_free} pages are free, {gpu.num_cached} cached, {num_held_pages} held, of {gpu.num_blocks}; "
                "some were not given back"
            )


def create_page_table(max_running_req: int, max_seq_len: int) -> Slots:
    """An empty table: int32 [requests, tokens]. Make rows whole pages long."""
    return np.zeros((max_running_req, max_seq_len), np.int32)


def get_mha_cache_per_page(  # noqa: PLR0917 (the original's order)
    head_dim: int, num_kv_heads: int, num_layers: int, page_size: int = 1, tp_size: int = 1, dtype_size: int = 2
) -> float:
    """Bytes of keys and values of a page on one of `tp_size` ranks; `dtype_size` is of one number, in bytes."""
    return 2 * head_dim * num_kv_heads * num_layers * page_size / tp_size * dtype_size


def get_num_pages_for_kv_cache(available_memory: float, cache_per_page: float) -> int:
    """How many whole pages fit, both given in bytes; also logged."""
    num_pages = int(available_memory // cache_per_page)
    logger.info("event=kv_cache_sized num_pages=%d gigabytes=%.3f", num_pages, num_pages * cache_per_page / 1e9)
    return num_pages


def print_radix_tree(
    root: RadixPrefixCache, max_depth: int = 10, show_ref_count: bool = True, show_timestamp: bool = False
) -> str:
    """Print a cache's tree down to `max_depth` nodes below the root, and return the text: each node's tokens and slots.

    `[R]` is the root, `[L]` a leaf. The reference count is that of locks on the node or beneath it; the timestamp is
    the order of uses.
    """
    views = [view for view in root.manager.blocks.view.runs() if not view.namespace]
    children: dict[bytes, list[RunView]] = {}
    num_locks = dict.fromkeys([view.hashes[-1] for view in views], 0)
    above = {view.parent_hash for view in views} - num_locks.keys()
    for view in reversed(views):  # children first
        children.setdefault(view.parent_hash, []).append(view)
        num_locks[view.hashes[-1]] += view.num_pins
        num_locks[view.parent_hash] = num_locks.get(view.parent_hash, 0) + num_locks[view.hashes[-1]]
    lines = ["[R] root"]

    def show(parent_hash: bytes, depth: int) -> None:
        for view in sorted(children[parent_hash], key=lambda view: view.token_ids.tolist()):
            name, indent = view.hashes[-1], "  " * depth
            slots = slots_of(view.block_ids, root.page_size).tolist()
            mark = "" if name in children else "[L] "
            line = f"{indent}{mark}{_clip(view.token_ids.tolist())} slots {_clip(slots)}"
            line += f" ref {num_locks[name]}" if show_ref_count else ""
            lines.append(line + (f" time {view.last_used}" if show_timestamp else ""))
            if not mark and depth < max_depth:
                show(name, depth + 1)
            elif not mark:
                lines.append(f"{indent}  ...")

    for root_hash in above:
        show(root_hash, 1)
    text = "\n".join(lines)
    print(text)
    return text


def _clip(values: Sequence[int]) -> str:
    text = str(values)
    return text if len(text) <= _CLIP else text[: _CLIP - 3] + "..."
