"""Pages of one of SGLang's device pools in the tiers below it. One thread."""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_cache.adapters.sglang_linker.chains import ChainPart, Hashes, PageChains
from fastdeploy_cache.adapters.sglang_linker.device_pools import DevicePool
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.kv.tensors import share_in_place, shared_handle

_MARGIN_SECONDS = 5.0  # behind a task's deadline its rank is killed and reaped; that answers every wait
_FLUSH_SECONDS = 5.0
_PAGES_REMEMBERED = 8  # for each of the CPU tier: storage has more
_MOST_TRIES = 8


class PageLoad:
    """Pages of one chain on their way into the device pool, which are pinned in the CPU tier until it has ended."""

    def __init__(self, cache: PrefixCacheManager, part: ChainPart, pages: Sequence[int], pinned: PinnedPrefix) -> None:
        self._cache, self._part, self._pages, self._pinned = cache, part, list(pages), pinned
        self._transfer: CallerTransfer | None = None
        self._num_tries, self._num_restarts = 0, -1

    def start(self) -> None:
        """Begin, if there is a place for its task now and memory; else it is begun where it is waited for."""
        copies = self._cache.blocks.copies
        self._num_tries += 1
        self._num_restarts = self._cache.ranks.statuses()[0].num_restarts
        try:
            transfer = copies.swap_in(self._part.request, self._pages, first_block=self._part.first)
        except MemoryError:
            return
        self._transfer = transfer if transfer.num_blocks == len(self._pages) else None

    def begin_again(self, deadline: float) -> bool:
        """It has failed, or there was no place for it: what is pinned can be read again. Whether it is worth another
        wait: not where a copy fails on a rank that lives, nor behind the deadline."""
        seconds = max(0.0, deadline - SYSTEM_CLOCK.now())
        if not seconds or self._num_tries >= _MOST_TRIES or not self._cache.ranks.wait_ready(seconds):
            return False
        if self._transfer is None:
            self._cache.wait_for_transfers(seconds)  # which have the places, or some of the memory
        elif not self._transfer.done or self._cache.ranks.statuses()[0].num_restarts == self._num_restarts:
            return False
        self._transfer = None
        self.start()
        return True

    def wait_layer(self, layer: int, deadline: float) -> bool:
        """Wait until a layer, as the pool counts them, is there; False where it has failed, or the time is over."""
        transfer, progress = self._transfer, self._cache.ranks.layer_progress(0)
        if transfer is None or progress is None or transfer.done:
            return self.wait(deadline)
        return progress.wait_layer(transfer.task_ids, layer, max(0.0, deadline - SYSTEM_CLOCK.now()))

    def wait(self, deadline: float) -> bool:
        """Wait until all of it is there; False where it has failed, or the time is over."""
        seconds = max(0.0, deadline - SYSTEM_CLOCK.now())
        return self._transfer is not None and self._transfer.wait(seconds)

    def end(self) -> None:
        """Wait until nothing is written any more, which every copy comes to by itself, and keep the pages no longer.
        Safe to call twice."""
        if self._transfer is not None:
            self._transfer.wait(longest_seconds_of(self._cache))
        self._cache.blocks.unpin(self._pinned)


def longest_seconds_of(cache: PrefixCacheManager) -> float:
    """How long a copy of a cache's can take: one that is late is answered by the death of its rank."""
    return cache.config.transfer.task_timeout_seconds + _MARGIN_SECONDS


class HeldPages(NamedTuple):
    """Pages that were found, and are pinned in the CPU tier until `PageCache.let_go`."""

    parts: list[tuple[ChainPart, PinnedPrefix]]

    @property
    def num_pages(self) -> int:
        """How many these are."""
        return sum(part.end - part.first for part, _ in self.parts)


class PageCache:
    """A `PrefixCacheManager` whose GPU blocks are SGLang's device pages, by number, and all the caller's.

    The pages of an offload are a chain from its front, or go on with the one in front of them. Of states each is stored
    by itself.
    """

    def __init__(self, config: CacheConfig, pool: DevicePool, *, is_state: bool) -> None:
        """Start the rank, and let it have the pool; its tensors move into shared memory on the CPU device.

        `is_state`: the model writes into what was loaded.

        Raises what `PrefixCacheManager` and `attach_kv` raise.
        """
        self.pool, self.is_state = pool, is_state
        self.cache = PrefixCacheManager(config)
        try:
            self.cache.blocks.allocate(pool.num_pages)
            self.cache.ranks.attach_kv(0, self._handle(config))
        except BaseException:
            self.cache.close()
            raise
        self._chains = PageChains(_PAGES_REMEMBERED * config.pool_sizes()[1])
        self.close = self.cache.close

    def _handle(self, config: CacheConfig) -> KVHandle:
        layout = config.rank_layout()
        assert layout is not None
        if config.transfer.device == "cuda":
            from fastdeploy_cache.transfer_manager.device.cuda import export_kv

            places = self.pool.places()
            return export_kv(layout, places, next(iter(places[0].values())).device_id)
        spans = share_in_place(array for in_layer in self.pool.arrays for array in in_layer)  # addresses change
        return shared_handle(layout, self.pool.places(), spans, os.getpid())

    def num_layers_up_to(self, layer: int) -> int:
        """The number of the pool's layers up to a layer of the model, with that one."""
        return bisect_right(self.pool.layers, layer)

    @property
    def longest_seconds(self) -> float:
        """How long a copy can take."""
        return longest_seconds_of(self.cache)

    @property
    def is_ready(self) -> bool:
        """Whether its rank is there now."""
        return self.cache.ranks.wait_ready(0)

    @property
    def pinned_share(self) -> float:
        """The share of the CPU tier that is pinned now."""
        stats = self.cache.blocks.view.tier_stats(CPU)
        return stats.num_protected / stats.num_blocks

    # -- finding

    def hold(self, hashes: Hashes, deadline: float | None = None) -> HeldPages:
        """Those of these pages, counted from the first, that are in the CPU tier. With a deadline, what is in storage
        alone is fetched first, as far as it comes until then."""
        held = HeldPages([])
        try:
            at = 0
            while at < len(hashes) and (found := self._find(hashes[at:], deadline)) is not None:
                held.parts.append(found)
                at += found[0].end - found[0].first
        except BaseException:
            self.let_go(held)
            raise
        return held

    def let_go(self, held: HeldPages) -> None:
        """The reverse. Safe to call twice."""
        for _, pinned in held.parts:
            self.cache.blocks.unpin(pinned)

    def knows(self, page: bytes) -> bool:
        """Whether this page was stored or found here, and may be in the CPU tier still."""
        return page in self._chains

    def _find(self, hashes: Hashes, deadline: float | None) -> tuple[ChainPart, PinnedPrefix] | None:
        """The chain on which the first of these pages lies, as far as it has them; it is pinned."""
        part = self._chains.part(hashes, is_known=deadline is None)
        pinned = self._pin(part)
        if pinned.num_blocks <= part.first and part.first:  # what is in front of it has gone
            self.cache.blocks.unpin(pinned)
            part = self._chains.fresh(hashes)
            pinned = self._pin(part)
        try:
            if pinned.num_blocks < part.end and deadline is not None and self._fetch(part, deadline):
                before, pinned = pinned, self._pin(part)  # kept meanwhile: what comes must not push it out
                self.cache.blocks.unpin(before)
            num_found = pinned.num_blocks - part.first
            if num_found > 0:
                self._chains.note(part, hashes[:num_found])
                return part._replace(end=pinned.num_blocks), pinned
        except BaseException:
            self.cache.blocks.unpin(pinned)
            raise
        self.cache.blocks.unpin(pinned)
        return None

    def _pin(self, part: ChainPart) -> PinnedPrefix:
        return self.cache.blocks.pin(part.request, part.end)

    def _fetch(self, part: ChainPart, deadline: float) -> bool:
        """Bring what storage has of a chain to the CPU tier; whether anything may have come."""
        seconds = deadline - SYSTEM_CLOCK.now()
        if seconds <= 0 or not self.cache.storage.is_attached:
            return False
        prefetch = self.cache.prefetch(part.request, with_last_token=True)
        prefetch.wait(seconds)
        self.cache.end_prefetch(part.request)
        return prefetch.num_fetched_blocks > 0

    # -- moving

    def load(self, hashes: Hashes, pages: Sequence[int], promised: Sequence[HeldPages] = ()) -> list[PageLoad] | None:
        """Loads of these pages, which are in the CPU tier, into device pages; None, and nothing is kept, where they are
        not all there. Nothing is begun yet. `promised`: what is held of them, wherever they were stored again since."""
        held = self.hold(hashes)
        if held.num_pages < len(hashes) and promised:
            self.let_go(held)
            for part, _ in (each for given in promised for each in given.parts):
                self._chains.note_again(part)
            held = self.hold(hashes)
        if held.num_pages < len(hashes):
            self.let_go(held)
            return None
        loads, at = list[PageLoad](), 0
        for part, pinned in held.parts:
            num = part.end - part.first
            loads.append(PageLoad(self.cache, part, pages[at : at + num], pinned))
            at += num
        return loads

    def store(self, hashes: Hashes, pages: Sequence[int]) -> tuple[CallerTransfer, bool]:
        """Copy these device pages to the CPU tier, as far as they are not there; and whether that is all of them."""
        blocks, part = self.cache.blocks, self._chains.part(hashes)
        num_found = blocks.lookup(part.request).num_blocks
        if num_found < part.first:
            part = self._chains.fresh(hashes)
            num_found = blocks.lookup(part.request).num_blocks
        num_cached = max(0, min(num_found, part.end) - part.first)
        generation = blocks.generation  # SGLang fills its pages anew at any time: what they hold is of now
        transfer = blocks.copies.swap_out(part.request, pages, first_block=part.first, generation=generation)
        num_there = num_cached + transfer.num_blocks
        self._chains.note(part, hashes[:num_there])
        return transfer, num_there >= len(hashes)

    # -- the whole

    def reset(self) -> None:
        """Forget what is in the CPU tier, and leave storage alone from now on: SGLang does not say whether the weights
        have changed, and pages of other weights have the same names."""
        self._chains.clear()
        if self.cache.storage.is_attached:
            self.cache.storage.flush(_FLUSH_SECONDS)
            self.cache.storage.detach()
        self.cache.reset()
