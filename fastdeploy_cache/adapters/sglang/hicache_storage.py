"""A storage backend for SGLang's HiCache: its third tier in our stores. `--hicache-storage-backend dynamic` with this
module and `FastDeployCacheStorage`; one is made in each of SGLang's scheduler processes."""

from __future__ import annotations

import atexit
import threading
from collections import Counter, deque
from collections.abc import Sequence
from typing import Any, NamedTuple

from fastdeploy_cache.adapters.known_versions import SGLANG, installed_version
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

try:
    from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, PoolHitPolicy, PoolTransferResult
    from sglang.srt.observability.metrics_collector import StorageMetrics

    from fastdeploy_cache.adapters.sglang.hicache_config import (
        KV_POOL,
        check_pool,
        hash_of,
        is_writer,
        settings_of,
        space_of,
        store_of,
    )
except ImportError:
    SGLANG.check(installed_version(SGLANG.package))  # names that an older one does not have
    raise
from fastdeploy_cache.adapters.sglang.host_pages import addresses_of_pages, addresses_of_tensors, piece_bytes_of
from fastdeploy_cache.adapters.sglang.stored_pages import StoredPages
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)

_MAX_ENDS = 32  # so many ends of a prefix are tried for the pages that states and windows need there
_MAX_NOTES = 1024  # until the next `get_stats`


class _Pool(NamedTuple):
    """One of SGLang's host pools and its pages in the store."""

    host: Any
    pages: StoredPages
    is_written: bool

    def addresses(self, num_pages: int, given: Any, *, by_index: bool) -> list[int]:
        """Where the pieces of these pages lie."""
        if by_index:
            return addresses_of_pages(self.host, num_pages, given, self.pages.piece_bytes)
        return addresses_of_tensors(given, num_pages, self.pages.piece_bytes[0])


class FastDeployCacheStorage(HiCacheStorage):  # type: ignore[misc]
    """See SGLang's `HiCacheStorage`. Its threads may call at the same time.

    No call raises, and none waits beyond `task_timeout_seconds`. Whatever becomes of the store, a page is either filled
    with what was written under its key, or it is a miss and as it was, and so are those behind it in the call.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002 (SGLang gives an empty one)
        """`storage_config`: a `HiCacheStorageConfig`; our options lie in its `extra_config`.

        Raises:
            ConfigError, LayoutError: what it asks for cannot be, or this SGLang is too old.
        """
        SGLANG.check(installed_version(SGLANG.package))
        self._config, self._settings = storage_config, settings_of(storage_config)
        self._pools: dict[str, _Pool] = {}
        self._lock = threading.Lock()
        self._mishaps = Counter[tuple[str, str]]()
        self._notes: dict[str, deque[tuple[int, float]]] = {
            name: deque(maxlen=_MAX_NOTES) for name in ("prefetch", "backup")
        }
        atexit.register(self.close)

    # -- pools

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """The pool of keys and values: its store is opened.

        Raises:
            ConfigError: its pages lie nowhere in memory, or the staging memory is too small for them.
            StorageRefusedError: the store's settings are wrong.
        """
        super().register_mem_pool_host(mem_pool_host)
        try:
            self._open(KV_POOL, mem_pool_host)
        except BaseException:
            self.close()
            raise

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """A pool beside it. One whose pages cannot be served is never found in the store.

        Raises:
            ConfigError: SGLang does not write what it would look for, so that nothing would ever be found.
        """
        super().register_mem_host_pool_v2(host_pool, host_pool_name)
        name = str(host_pool_name)
        if name in self._pools:
            return
        try:
            check_pool(self._config, host_pool, name)
        except ConfigError:
            self.close()
            raise
        try:
            self._open(name, host_pool)
        except Exception as error:
            self._say("not_served", name, error)

    def _open(self, name: str, host: Any) -> None:
        by_index = self._settings.by_index or name != KV_POOL
        piece_bytes = piece_bytes_of(host) if by_index else (host.get_dummy_flat_data_page().nbytes,)
        if not sum(piece_bytes):
            raise ConfigError(f"the pool {name!r} ({type(host).__name__}) has no pages in memory that could be stored")
        image = "pieces" if by_index else "flat"
        kv = self._pools.get(KV_POOL)
        kv_bytes = sum(piece_bytes if kv is None else kv.pages.piece_bytes)
        storage = store_of(self._settings.storage, name, sum(piece_bytes), kv_bytes)
        space = space_of(self._config, storage, host, name=name, piece_bytes=piece_bytes, image=image)
        pages = StoredPages(storage, space, piece_bytes)
        pages.start()
        self._pools[name] = _Pool(host, pages, is_writer(self._config, name))
        logger.info("event=hicache_pool_open pool=%s page_bytes=%d space=%s", name, space.object_bytes, space.digest)

    # -- pages of the pool of keys and values

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:  # noqa: ARG002
        """How many of the pages, counted from the first, are there."""
        return self._count(KV_POOL, keys, self._new_deadline())

    def exists(self, key: str) -> bool:
        """The same for one."""
        return self._count(KV_POOL, [key], self._new_deadline()) == 1

    def batch_get_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Fill the pages at these places of the host pool; for each whether it was."""
        return self._move(KV_POOL, keys, host_indices, self._new_deadline(), is_read=True)

    def batch_set_v1(self, keys: Sequence[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Store the pages at these places; for each whether it is there now."""
        return self._move(KV_POOL, keys, host_indices, self._new_deadline(), is_read=False)

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[Any]:  # noqa: ARG002
        """Fill tensors, one flat page each; for each the tensor, or None. Without `interface_v1` only."""
        targets = list(target_locations) if target_locations is not None else []
        filled = self._move(KV_POOL, keys, targets, self._new_deadline(), is_read=True, by_index=False)
        return [targets[index] if is_filled else None for index, is_filled in enumerate(filled)]

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        """The same for one."""
        return self.batch_get([key], [target_location], [target_sizes])[0]

    def batch_set(
        self,
        keys: Sequence[str],
        values: Any = None,
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store tensors, one flat page each; whether all are there now. Without `interface_v1` only."""
        tensors = list(values) if values is not None else []
        return all(self._move(KV_POOL, keys, tensors, self._new_deadline(), is_read=False, by_index=False))

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """The same for one."""
        return self.batch_set([key], [value], target_location, target_sizes)

    # -- pages of several pools

    def batch_exists_v2(self, keys: Sequence[str], pool_transfers: Any = None, extra_info: Any = None) -> Any:  # noqa: ARG002
        """The longest prefix that can be restored: its KV is there, and what the other pools need for it.

        Pools that need all pages bound it by their own. Those that need the last pages only are asked at one end after
        the other, from the longest on; `restorable_prefix_pages` names all ends that hold, as SGLang takes one that
        holds on every rank and for which it has room.
        """
        deadline = self._new_deadline()
        num_pages = self._count(KV_POOL, keys, deadline)
        hits, trailing = {KV_POOL: num_pages}, []
        for transfer in pool_transfers or []:
            if transfer.hit_policy == PoolHitPolicy.ALL_PAGES:
                hits[str(transfer.name)] = self._count(str(transfer.name), keys[:num_pages], deadline)
            elif transfer.hit_policy == PoolHitPolicy.TRAILING_PAGES:
                trailing.append((str(transfer.name), max(1, len(transfer.keys or ()))))
        num_pages = min(hits.values())
        if not trailing:
            return PoolTransferResult(num_pages, hits, list(range(1, num_pages + 1)))
        ends = range(num_pages, max(0, num_pages - _MAX_ENDS), -1)
        found = sorted(end for end in ends if self._has_ends(trailing, keys[:end], deadline))
        longest = found[-1] if found else 0
        hits |= {name: longest for name, _ in trailing}
        return PoolTransferResult(longest, hits, found)

    def _has_ends(self, trailing: Sequence[tuple[str, int]], keys: Sequence[str], deadline: float) -> bool:
        return all(self._count(name, keys[-num:], deadline) == min(num, len(keys)) for name, num in trailing)

    def batch_get_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        """What `batch_get_v1` does, for each pool; by its name."""
        return self._move_pools(transfers, is_read=True)

    def batch_set_v2(self, transfers: Any, extra_info: Any = None) -> dict[Any, list[bool]]:  # noqa: ARG002
        """What `batch_set_v1` does, for each pool; by its name."""
        return self._move_pools(transfers, is_read=False)

    def _move_pools(self, transfers: Any, *, is_read: bool) -> dict[Any, list[bool]]:
        deadline = self._new_deadline()
        return {
            each.name: self._move(str(each.name), each.keys or [], each.host_indices, deadline, is_read=is_read)
            for each in transfers
        }

    # -- the whole

    def clear(self) -> bool:
        """Forget everything of these weights, whosever pages they are; whether that has been done."""
        deadline = self._new_deadline()
        cleared = [pool.pages.clear(deadline) for pool in self._pools.values()]  # all, also behind one that fails
        return all(cleared)

    def get_stats(self) -> Any:
        """Pages and gigabytes a second of each call that moved some, since this was asked before."""
        stats = StorageMetrics()
        with self._lock:
            for side, notes in self._notes.items():
                getattr(stats, f"{side}_pgs").extend(num_pages for num_pages, _ in notes)
                getattr(stats, f"{side}_bandwidth").extend(speed for _, speed in notes)
                notes.clear()
        return stats

    def close(self) -> None:
        """End the storage processes, which makes durable what is not. Safe to call twice."""
        atexit.unregister(self.close)
        for pool in self._pools.values():
            pool.pages.close()

    # -- how

    def _new_deadline(self) -> float:
        """One for a whole call, however many pools it asks."""
        return SYSTEM_CLOCK.now() + self._settings.storage.task_timeout_seconds

    def _count(self, name: str, keys: Sequence[str], deadline: float) -> int:
        pool = self._pools.get(name)
        try:
            if pool is None or not keys:
                return 0
            return pool.pages.count_leading(list(map(hash_of, keys)), deadline)
        except Exception as error:
            self._say("lookup_failed", name, error)
            return 0

    def _move(
        self, name: str, keys: Sequence[str], given: Any, deadline: float, *, is_read: bool, by_index: bool = True
    ) -> list[bool]:
        """Whether each page was moved. `given`: the places in the host pool, or not `by_index` flat tensors;
        the pool of keys and values is served in one of the two ways."""
        pool, num_moved = self._pools.get(name), 0
        try:
            is_served = name != KV_POOL or by_index is self._settings.by_index
            if pool is not None and keys and is_served and (is_read or pool.is_written):
                started, hashes = SYSTEM_CLOCK.now(), list(map(hash_of, keys))
                addresses = pool.addresses(len(keys), given, by_index=by_index)
                num_moved = (pool.pages.read if is_read else pool.pages.write)(hashes, addresses, deadline)
                self._note(pool, num_moved, SYSTEM_CLOCK.now() - started, is_read=is_read)
        except Exception as error:
            self._say("read_failed" if is_read else "write_failed", name, error)
            num_moved = 0
        return [index < num_moved for index in range(len(keys))]

    def _say(self, event: str, name: str, error: Exception) -> None:
        """Log it, and of what happens again and again each time that it has happened twice as often."""
        with self._lock:
            num = self._mishaps[event, name] = self._mishaps[event, name] + 1
        if not num & (num - 1):  # as text: a record that kept the exception would keep its frames
            logger.warning("event=hicache_%s pool=%s num=%d error=%s", event, name, num, repr(error))

    def _note(self, pool: _Pool, num_pages: int, seconds: float, *, is_read: bool) -> None:
        if num_pages:
            num_bytes = num_pages * sum(pool.pages.piece_bytes)
            with self._lock:
                self._notes["prefetch" if is_read else "backup"].append((num_pages, num_bytes / seconds / 1e9))
