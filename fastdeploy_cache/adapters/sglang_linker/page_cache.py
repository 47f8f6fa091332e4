"""Pages of one of SGLang's device pools in the tiers below it. One thread."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fastdeploy_cache.adapters.sglang_linker.chains import ChainPart, Hashes, PageChains
from fastdeploy_cache.adapters.sglang_linker.device_pools import DevicePool
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.kv.tensors import share_in_place, shared_handle

_MARGIN_SECONDS = 5.0  # behind a task's deadline its rank is killed and reaped; that answers every wait
_FLUSH_SECONDS = 5.0
_PAGES_REMEMBERED = 8  # for each of the CPU tier: storage has more


def longest_seconds_of(cache: PrefixCacheManager) -> float:
    """How long a copy of a cache's can take: one that is late is answered by the death of its rank."""
    return cache.config.transfer.task_timeout_seconds + _MARGIN_SECONDS


class PageLoad:
    """Pages of one chain on their way into the device pool, which are pinned in the CPU tier until it has ended."""

    def __init__(self, cache: PrefixCacheManager, link: ChainPart, pages: Sequence[int], pinned: PinnedPrefix) -> None:
        self._cache, self._link, self._pages, self._pinned = cache, link, list(pages), pinned
        self._transfer: CallerTransfer | None = None

    def start(self) -> bool:
        """Begin, or begin again; whether that can be now."""
        copies = self._cache.blocks.copies
        transfer = copies.swap_in(self._link.request, self._pages, first_block=self._link.first)
        self._transfer = transfer if transfer.num_blocks == len(self._pages) else None
        return self._transfer is not None

    @property
    def is_going(self) -> bool:
        """It is on its way."""
        return self._transfer is not None and not self._transfer.done

    @property
    def has_landed(self) -> bool:
        """All of it is there."""
        return self._transfer is not None and self._transfer.succeeded

    def wait_layer(self, layer: int, deadline: float) -> bool:
        """Wait until a layer, as the pool counts them, is there; False where it has failed, or the time is over."""
        transfer, progress = self._transfer, self._cache.ranks.layer_progress(0)
        if transfer is None or progress is None:
            return self.wait(deadline)
        if transfer.done:
            return transfer.succeeded
        return progress.wait_layer(transfer.task_ids, layer, max(0.0, deadline - SYSTEM_CLOCK.now()))

    def wait(self, deadline: float) -> bool:
        """Wait until all of it is there; False where it has failed, or the time is over."""
        seconds = max(0.0, deadline - SYSTEM_CLOCK.now())
        return self._transfer is not None and self._transfer.wait(seconds)

    @property
    def longest_seconds(self) -> float:
        """How long a copy can take."""
        return longest_seconds_of(self._cache)

    def wait_ranks(self, deadline: float) -> bool:
        """Wait until the rank is there, or there again."""
        return self._cache.ranks.wait_ready(max(0.0, deadline - SYSTEM_CLOCK.now()))

    def end(self) -> None:
        """The pages need not be kept for it. Safe to call twice."""
        self._cache.blocks.unpin(self._pinned)


class PageCache:
    """A `PrefixCacheManager` whose GPU blocks are SGLang's device pages, by number, and all the caller's.

    The pages of a prefix are a chain. Those that are asked for one by one, as a window's and a state, are each a chain
    of its own (`is_loose`).
    """

    def __init__(self, config: CacheConfig, pool: DevicePool, *, is_loose: bool) -> None:
        """Start the rank, and let it have the pool; its tensors move into shared memory on the CPU device.

        Raises what `PrefixCacheManager` and `attach_kv` raise.
        """
        self.pool, self._is_loose = pool, is_loose
        self.layer_of = {layer: number for number, layer in enumerate(pool.layers)}
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

    @property
    def longest_seconds(self) -> float:
        """How long a copy can take: one that is late is answered by the death of its rank."""
        return longest_seconds_of(self.cache)

    @property
    def is_ready(self) -> bool:
        """Whether its rank is there now."""
        return self.cache.ranks.wait_ready(0)

    # -- finding

    def num_found(self, hashes: Hashes, deadline: float | None = None) -> int:
        """How many of these pages, counted from the first, are in the CPU tier. With a deadline, what is in storage
        alone is fetched first, as far as it comes until then."""
        return sum(link.end - link.first for link in self._links(hashes, deadline))

    def _links(self, hashes: Hashes, deadline: float | None = None) -> list[ChainPart]:
        """PageChains on which these pages lie in the CPU tier, as far as they do."""
        links, at = list[ChainPart](), 0
        while at < len(hashes):
            wanted = hashes[at : at + 1] if self._is_loose else hashes[at:]
            link = self._find(wanted, deadline)
            if link is None:
                break
            links.append(link)
            at += link.end - link.first
        return links

    def _find(self, hashes: Hashes, deadline: float | None) -> ChainPart | None:
        link = self._chains.link(hashes)
        num_found = self._num_cached(link)
        if not num_found and link.first:  # what is in front of it has gone
            link = self._chains.fresh(hashes)
            num_found = self._num_cached(link)
        if num_found < len(hashes) and deadline is not None and self._fetch(link, deadline):
            num_found = self._num_cached(link)
        if not num_found:
            return None
        self._chains.note(link, hashes[:num_found])
        return link._replace(end=link.first + num_found)

    def _num_cached(self, link: ChainPart) -> int:
        return max(0, min(self.cache.blocks.lookup(link.request).num_blocks, link.end) - link.first)

    def _fetch(self, link: ChainPart, deadline: float) -> bool:
        """Bring what storage has of a chain to the CPU tier; whether anything may have come."""
        seconds = deadline - SYSTEM_CLOCK.now()
        if seconds <= 0 or not self.cache.storage.is_attached:
            return False
        prefetch = self.cache.prefetch(link.request, with_last_token=True)
        prefetch.wait(seconds)
        self.cache.end_prefetch(link.request)
        return prefetch.num_fetched_blocks > 0

    def keep(self, hashes: Hashes) -> list[PinnedPrefix]:
        """Keep these pages in the CPU tier, as far as they are there, until `let_go`."""
        return [self.cache.blocks.pin(link.request, link.end) for link in self._links(hashes)]

    def let_go(self, kept: Sequence[PinnedPrefix]) -> None:
        """The reverse. Safe to call twice."""
        for pinned in kept:
            self.cache.blocks.unpin(pinned)

    # -- moving

    def load(self, hashes: Hashes, pages: Sequence[int]) -> list[PageLoad] | None:
        """Loads of these pages, which are in the CPU tier, into device pages; None, and nothing is kept, where they are
        not all there. Nothing is begun yet."""
        loads, at = list[PageLoad](), 0
        for link in self._links(hashes):
            pinned = self.cache.blocks.pin(link.request, link.end)
            num = link.end - link.first
            loads.append(PageLoad(self.cache, link, pages[at : at + num], pinned))
            at += num
            if pinned.num_blocks < link.end:
                break
        else:
            if at == len(hashes):
                return loads
        for load in loads:
            load.end()
        return None

    def store(self, hashes: Hashes, pages: Sequence[int]) -> tuple[list[CallerTransfer], bool]:
        """Copy these device pages to the CPU tier, as far as they are not there; and whether that is all of them."""
        transfers, is_whole = list[CallerTransfer](), True
        step = 1 if self._is_loose else len(hashes)
        for at in range(0, len(hashes), step):
            transfer, is_all = self._store(hashes[at : at + step], pages[at : at + step])
            transfers.append(transfer)
            is_whole &= is_all
        return transfers, is_whole

    def _store(self, hashes: Hashes, pages: Sequence[int]) -> tuple[CallerTransfer, bool]:
        blocks, link = self.cache.blocks, self._chains.link(hashes)
        if link.first and blocks.lookup(link.request).num_blocks < link.first:
            link = self._chains.fresh(hashes)
        num_cached = self._num_cached(link)
        generation = blocks.generation  # SGLang fills its pages anew at any time: what they hold is of now
        transfer = blocks.copies.swap_out(link.request, pages, first_block=link.first, generation=generation)
        self._chains.note(link, hashes)
        return transfer, num_cached + transfer.num_blocks >= len(hashes)

    # -- the whole

    def reset(self) -> None:
        """Forget what is in the CPU tier, and leave storage alone from now on: SGLang does not say whether the weights
        have changed, and pages of other weights have the same names."""
        self._chains.clear()
        if self.cache.storage.is_attached:
            self.cache.storage.flush(_FLUSH_SECONDS)
            self.cache.storage.detach()
        self.cache.reset()
