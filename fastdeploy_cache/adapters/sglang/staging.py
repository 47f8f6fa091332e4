"""Shared memory that pages go through: SGLang's own host pools cannot be shared once they have been made."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.ipc.shared_array import SharedArray

_MAX_PAGES = 128  # each way: what SGLang moves in one call


class Desk:
    """Staging pages for one way, on two trays: while the process works on one, the other is filled or emptied.

    Whoever holds `lock` has them. `num_left`: of tasks that outlast their caller; the last one gives the lock up.
    """

    def __init__(self, first: int, num: int) -> None:
        self.lock, self.num_left = threading.Lock(), 0
        self.tray_pages, num_trays = max(1, num // 2), min(num, 2)
        ids = np.arange(first, first + self.tray_pages * num_trays, dtype=np.int32)
        self.trays = ids.reshape(num_trays, self.tray_pages)


class Staging:
    """A desk for each way, and a page for probes. A page lies in the pool in pieces, and here in a row."""

    def __init__(self, num_bytes: int, piece_bytes: Sequence[int]) -> None:
        """Take at most `num_bytes`.

        Raises:
            ConfigError: there is room for fewer than three pages.
            NotEnoughMemoryError: there is no memory for them.
        """
        self.piece_bytes, self._page_bytes = tuple(piece_bytes), sum(piece_bytes)
        num_fitting = num_bytes // self._page_bytes
        if num_fitting < 3:
            raise ConfigError(
                f"staging_bytes is {num_bytes}, and a page takes {self._page_bytes}; "
                f"use at least {3 * self._page_bytes}"
            )
        num_each = min((num_fitting - 1) // 2, _MAX_PAGES)
        shape = (2 * num_each + 1, self._page_bytes)
        self.segment = SharedArray.create("hicache-staging", shape[0] * shape[1])
        self._memory = self.segment.view(np.uint8, shape)
        self._base: int = self._memory.__array_interface__["data"][0]
        self.reading, self.writing = Desk(0, num_each), Desk(num_each, num_each)
        self.probe_ids = np.array([2 * num_each], np.int32)

    def fill(self, ids: Int32Array, addresses: Sequence[int]) -> None:
        """Copy pages here. `addresses`: of the pieces in the pool, page by page; further ones are not looked at."""
        for staged, address, num_bytes in self._pieces(ids, addresses):
            ctypes.memmove(staged, address, num_bytes)

    def empty(self, ids: Int32Array, addresses: Sequence[int]) -> None:
        """Copy pages from here into the pool."""
        for staged, address, num_bytes in self._pieces(ids, addresses):
            ctypes.memmove(address, staged, num_bytes)

    def _pieces(self, ids: Int32Array, addresses: Sequence[int]) -> list[tuple[int, int, int]]:
        starts = np.cumsum([0, *self.piece_bytes[:-1]])
        staged = (self._base + ids[:, None].astype(np.int64) * self._page_bytes + starts).ravel().tolist()
        return list(zip(staged, addresses, self.piece_bytes * len(ids), strict=False))

    def close(self, timeout_seconds: float) -> None:
        """Give the memory back, once nobody copies; the desks stay taken. Somebody may do so for too long: then the
        memory goes with this object."""
        for desk in (self.reading, self.writing):
            if not desk.lock.acquire(timeout=timeout_seconds):
                return
        del self._memory
        self.segment.close()
