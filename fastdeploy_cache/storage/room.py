"""How many CPU blocks prefetches may take. Under the lock."""

from __future__ import annotations

from collections import OrderedDict

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.evicting import drop_spare_copies
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.storage.prefetch import StorageLimits, StoragePrefetch

_KEPT_SECONDS = 60.0  # what was brought for a request that is not matched yet: others are not read over it so long


class PrefetchRoom:
    """What was brought for requests that are not matched yet is no room for another such request: of a queue that does
    not fit, the first ones are there when they are matched, where otherwise each would take the place of the one
    before.

    Attributes:
        num_fetching: blocks that are being read, or are held until a checkpoint has come.
    """

    def __init__(self, books: Books, limits: StorageLimits) -> None:
        self._books, self._clock, self._tree = books, books.clock, books.tree
        self._max_blocks = limits.max_blocks
        self._kept: OrderedDict[StoragePrefetch, int] = OrderedDict()  # blocks that nobody holds yet
        self._num_kept = 0
        self.num_fetching = 0

    def keep(self, prefetch: StoragePrefetch, num_blocks: int) -> None:
        """So many more blocks have come for a request that is not matched yet."""
        self._kept[prefetch] = self._kept.get(prefetch, 0) + num_blocks
        self._num_kept += num_blocks

    def keep_no_more(self, prefetch: StoragePrefetch) -> None:
        """A match holds what has come, or nobody wants it."""
        self._num_kept -= self._kept.pop(prefetch, 0)

    def num_blocks(self, prefetch: StoragePrefetch) -> int:
        """How many blocks can be read for a prefetch now."""
        residency, num_allowed = self._tree.residency, self._max_blocks - self.num_fetching
        tenant = self._books.tenant_of(prefetch.namespace)
        if num_allowed > 0 and not residency.num_available(CPU, tenant) and prefetch.is_followed:
            path, _ = self._tree.find(prefetch.namespace, prefetch.keys, prefetch.first + prefetch.num_landed)
            for run in path:
                drop_spare_copies(residency, run)
        num_available = residency.num_available(CPU, tenant)
        if prefetch.is_followed:
            return min(num_allowed, num_available)
        while self._kept and num_available <= self._num_kept:
            oldest = next(iter(self._kept))
            if self._is_kept(oldest):
                break
            self.keep_no_more(oldest)
        return min(num_allowed, num_available - self._num_kept)

    def _is_kept(self, prefetch: StoragePrefetch) -> bool:
        """Not what is cached no more, nor what an engine seems to have forgotten."""
        if prefetch.epoch != self._tree.epoch:
            return False
        if self._clock.now() - prefetch.began_at > _KEPT_SECONDS and not prefetch.num_in_flight:
            return False
        num_brought = prefetch.first + prefetch.num_landed
        return self._tree.find(prefetch.namespace, prefetch.keys, num_brought)[1] >= num_brought
