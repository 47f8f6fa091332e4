"""Blocks that nobody owns are written over, and looked at later: who reads one reads nonsense, a writer is seen."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.books.block_pool import FREE, BlockPool, Owner
from fastdeploy_cache.launch.faults.kv_bytes import KVBytes
from fastdeploy_cache.launch.faults.row_bytes import RowBytes

_NONSENSE = 0xEE
Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class FreeBlockWatch:
    """Watches one cache: its GPU blocks on all ranks, and its CPU blocks."""

    def __init__(self, cache: PrefixCacheManager) -> None:
        self._cache = cache
        segments = cache._movement.client.cpu_segments()
        num_blocks = cache.config.pool_sizes()[1]
        self._cpu = [segment.view(np.uint8, (num_blocks, segment.num_bytes // num_blocks)) for segment in segments]
        rows = cache._books.rows
        self._tiers = [_Tier(pool) for pool in cache._books.pools]
        self._rows = [_Tier(pool.pool) for pool in rows.checkpoints.pools] if rows is not None else []

    def look(self, kv: Sequence[KVBytes], row_kv: Sequence[RowBytes] = ()) -> str | None:
        """What was written into a block that nobody has had since the last look, if any was. A turn of its own."""
        cache = self._cache
        with cache._books:
            if cache._books.is_closed or cache._books.asleep:
                for tier in (*self._tiers, *self._rows):
                    tier.forget()
                return None
            generation = cache._books.tree.generation
            gpu = [array for rank in kv for array in rank.arrays]
            for name, tier, arrays in zip(("GPU", "CPU"), self._tiers, (gpu, self._cpu), strict=True):
                wrong = tier.look(arrays, generation)
                if wrong:
                    return f"{name} blocks {wrong}"
            for number, tier in enumerate(self._rows):
                arrays = [array for rank in row_kv for array in rank.arrays[number]]
                if wrong := tier.look(arrays, generation):
                    return f"units {wrong} of row {number}"
        return None


class _Tier:
    def __init__(self, pool: BlockPool) -> None:
        self._pool, self._allocate, self._take_soiled = pool, pool.allocate, pool.take_soiled
        self._known: set[int] = set()  # that were free, and have not been given to anybody since
        self._arrays: list[Bytes] = []
        self._generation = -1
        pool.allocate = self._note  # type: ignore[method-assign]
        pool.take_soiled = self._note_soiled  # type: ignore[method-assign]

    def _note(self, num_blocks: int, owner: Owner) -> array[int]:
        ids = self._allocate(num_blocks, owner)
        self._known.difference_update(ids)
        return ids

    def _note_soiled(self) -> array[int]:
        ids = self._take_soiled()
        self._known.difference_update(ids)
        return ids

    def forget(self) -> None:
        """The memory is another one."""
        self._known.clear()

    def look(self, arrays: list[Bytes], generation: int) -> list[int]:
        """Blocks that were written; all that are free are written over."""
        is_same = generation == self._generation and [id(a) for a in arrays] == [id(a) for a in self._arrays]
        free = np.array(self._pool.ids_of(FREE), np.intp)
        wrong = set[int]()
        known = np.array(sorted(self._known), np.intp)
        for each in arrays if is_same and len(known) else ():
            found = (each[known].reshape(len(known), -1) != _NONSENSE).any(axis=1)
            wrong.update(known[found].tolist())
        for each in arrays:
            each[free] = _NONSENSE
        self._known, self._arrays, self._generation = set(free.tolist()), arrays, generation
        return sorted(wrong)
