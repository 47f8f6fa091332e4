"""SGLang's `UnifiedCacheLinker` over our CPU tier, storage and ranks: `--enable-unified-cache-external-linker` with the
backend `dynamic`, this module and `FastDeployCacheLinker`. One is made in each of SGLang's scheduler processes."""

from __future__ import annotations

import atexit
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fastdeploy_cache.adapters.known_versions import SGLANG, installed_version

try:
    from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinker

    from fastdeploy_cache.adapters.sglang_linker.settings import check_version, settings_of
except ImportError:
    SGLANG.check(installed_version(SGLANG.package))  # names that an older one does not have
    raise
from fastdeploy_cache.adapters.sglang_linker.device_pools import KV, MAMBA, device_pools
from fastdeploy_cache.adapters.sglang_linker.ends import Ends, fetch_last
from fastdeploy_cache.adapters.sglang_linker.loads import LayerLoads
from fastdeploy_cache.adapters.sglang_linker.offloads import Offloads
from fastdeploy_cache.adapters.sglang_linker.page_cache import PageCache, PageLoad
from fastdeploy_cache.adapters.sglang_linker.promises import Promises
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)

_MOST_FETCHED = 32  # boundaries whose windows and states storage is asked for, from the deepest on
_MOST_ASKED = 4096  # requests of which it is remembered that storage was asked
Loads = Sequence[tuple[PageCache, PageLoad]]


class FastDeployCacheLinker(UnifiedCacheLinker):  # type: ignore[misc]
    """See SGLang's `UnifiedCacheLinker`. Its scheduler's thread calls, and nobody else."""

    def __init__(
        self,
        server_args: Any,  # noqa: ARG002 (SGLang's interface)
        params: Any,
        *,
        components: Any,
        extra_config: Mapping[str, Any] | None = None,
        forward_stream: Any = None,
    ) -> None:
        """Start a cache for each device pool.

        Raises:
            ConfigError, LayoutError: another version, a component or a pool that cannot be restored, or settings that
                cannot be: SGLang does not start.
        """
        check_version()
        self.forward_stream = forward_stream
        pools = device_pools(params, components)
        settings = settings_of(extra_config or {}, pools, params)
        self._prefetch_seconds = settings.prefetch_seconds
        self._caches: dict[str, PageCache] = {}
        atexit.register(self.close)
        try:
            for pool, config in zip(pools, settings.caches, strict=True):
                self._caches[pool.name] = PageCache(config, pool, is_state=pool.name == MAMBA)
        except BaseException:
            self.close()
            raise
        self.pools = {pool.name: pool for pool in pools}
        self.layer_done_counter = LayerLoads(1 + max(pool.layers[-1] for pool in pools), settings.load_seconds)
        if MAMBA in self.pools:
            params.req_to_token_pool.register_layer_transfer_counter(self.layer_done_counter)
        self._is_cuda = settings.caches[0].transfer.device == "cuda"
        self._is_alone = settings.num_ranks == 1
        self._pending: dict[str, tuple[Loads, bool]] = {}  # and whether that is all
        self._offloads = Offloads()
        self._promises = Promises(list(self._caches.values()))
        self._asked: OrderedDict[str, tuple[bytes, int]] = OrderedDict()  # the tail for which storage was asked
        for name, cache in self._caches.items():
            sizes = cache.cache.config.pool_sizes()
            logger.info("event=linker_pool pool=%s num_device_pages=%d num_cpu_pages=%d", name, *sizes)

    # -- looking up

    def lookup(self, rid: str, transfers: Sequence[Any]) -> list[int]:
        """Every number of leading pages that can be restored; what of these is in storage alone is fetched first."""
        self._promises.end_old()
        wanted = {str(each.name): [bytes.fromhex(key) for key in each.keys] for each in transfers}
        keys = wanted.pop(KV, [])
        if not keys or not set(wanted) <= set(self._caches) or not all(each.is_ready for each in self._caches.values()):
            return []
        deadline = self._deadline_of(rid, keys)
        held = [(self._caches[KV], self._caches[KV].hold(keys, deadline))]
        try:
            reaches = [(self._caches[name], len(tail)) for name, tail in wanted.items()]
            found = range(1, held[0][1].num_pages + 1)
            ends = [Ends(cache, keys[: len(found)], reach) for cache, reach in reaches]
            held += [(each.cache, each.held) for each in ends]
            for each in ends:
                each.find()
            if deadline is not None and ends:
                fetch_last(ends, found[-_MOST_FETCHED:], deadline)
        except BaseException:
            for cache, pages in held:
                cache.let_go(pages)
            raise
        restorable = [end for end in found if all(each.has(end) for each in ends)]
        self._promises.keep(rid, held)
        if not restorable:
            self._promises.end(rid)
        return restorable

    def _deadline_of(self, rid: str, keys: Sequence[bytes]) -> float | None:
        """Storage is asked once for a request and its tail: SGLang looks up again at each step in which it waits."""
        tail = keys[0], len(keys)
        is_new, self._asked[rid] = self._asked.get(rid) != tail, tail
        self._asked.move_to_end(rid)
        if len(self._asked) > _MOST_ASKED:
            self._asked.popitem(last=False)
        return SYSTEM_CLOCK.now() + self._prefetch_seconds if is_new else None

    # -- loading

    def load(self, rid: str, transfers: Sequence[Any]) -> bool:
        """Queue a load. False: it is not in the CPU tier any more, and is computed.

        Of several ranks all have to answer alike, and each knows its own pages: they queue it in any case, and a load
        that cannot be begun then fails with its batch.
        """
        loads, is_whole = list[tuple[PageCache, PageLoad]](), True
        try:
            for each in transfers:
                cache, hashes, pages = self._given(each)
                found = cache.load(hashes, pages, self._promises.held(rid, cache))
                is_whole &= found is not None
                loads += [(cache, load) for load in found or ()]
        except MemoryError:
            is_whole = False
        except BaseException:
            _end(loads)
            raise
        self._promises.end(rid)
        if not is_whole and self._is_alone:
            _end(loads)
            return False
        before, self._pending[rid] = self._pending.get(rid, ((), True)), (loads, is_whole)
        _end(before[0])
        return True

    def start_layer_wise_loading(self) -> int:
        """Start what is queued; the index of that batch, or -1 where there is nothing."""
        if not self._pending:
            return -1
        if self._is_cuda:  # the slots were others' a moment ago
            for event in self.record_offload_ready():
                event.synchronize()
        pending, self._pending = list(self._pending.values()), {}
        is_short = not all(is_whole for _, is_whole in pending)
        return self.layer_done_counter.begin([each for loads, _ in pending for each in loads], is_short=is_short)

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        """Wait until the batch stops writing; whether all of it is there."""
        return self.layer_done_counter.finish(counter_index)

    def cancel_queued_load(self, rid: str) -> bool:
        """Whether a load was queued, and is not any more."""
        self._promises.end(rid)
        queued = self._pending.pop(rid, None)
        _end(queued[0] if queued is not None else ())
        return queued is not None

    # -- storing

    def offload(self, transfers: Sequence[Any], session_id: str | None = None) -> bool:  # noqa: ARG002
        """Queue copies of these device pages, which stay as they are until it is told that they have ended."""
        if any(str(each.name) not in self._caches for each in transfers):
            return False
        work = [self._given(each) for each in transfers]
        if not work:
            return False
        self._offloads.add(partial(_store, work), self.record_offload_ready() if self._is_cuda else ())
        return True

    def _given(self, transfer: Any) -> tuple[PageCache, list[bytes], list[int]]:
        """The cache of a transfer's pool, its pages' hashes and numbers."""
        cache = self._caches[str(transfer.name)]
        pages = cache.pool.pages_of(transfer.device_indices, len(transfer.keys))
        return cache, [bytes.fromhex(key) for key in transfer.keys], pages

    def num_completed_offloads(self) -> int:
        """How many have ended, counted from the oldest."""
        return self._offloads.num_done()

    def pop_completed_offload(self) -> bool:
        """Whether the oldest has succeeded."""
        return self._offloads.pop()

    # -- the whole

    def reset(self) -> None:
        """Wait for all that moves, and forget what is in the CPU tier. Storage is left alone from then on."""
        self._end_all()
        for cache in self._caches.values():
            cache.reset()
        self._asked.clear()

    def close(self) -> None:
        """Wait for all that moves, and end the processes. Safe to call twice."""
        atexit.unregister(self.close)
        if hasattr(self, "_promises"):  # else it has not started
            self._end_all()
        for cache in self._caches.values():
            cache.close()

    def _end_all(self) -> None:
        for rid in list(self._pending):
            self.cancel_queued_load(rid)
        self._promises.end_all()
        self.layer_done_counter.finish_all()
        seconds = max(cache.longest_seconds for cache in self._caches.values())
        self._offloads.end_all(seconds)


def _store(work: Sequence[tuple[PageCache, list[bytes], list[int]]]) -> tuple[list[CallerTransfer], bool]:
    """Copies of all pools' pages, and whether they are of all."""
    transfers, is_whole = list[CallerTransfer](), True
    try:
        for cache, hashes, pages in work:
            transfer, is_all = cache.store(hashes, pages)
            transfers.append(transfer)
            is_whole &= is_all
    except MemoryError:
        is_whole = False
    return transfers, is_whole


def _end(loads: Loads) -> None:
    for _, load in loads:
        load.end()
