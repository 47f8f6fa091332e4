"""SGLang's pools: token slots on the GPU, and each request's row of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.adapters.pages import Slots, slots_of
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.manager import PrefixCacheManager


class TokenToKVPoolAllocator:
    """Token slots, a page at a time. They are the caller's until `free`, or until the cache adopts them."""

    def __init__(self, manager: PrefixCacheManager) -> None:
        self._manager = manager
        self.page_size = manager.config.block_size
        self.size = manager.tier_stats().num_blocks * self.page_size

    def available_size(self) -> int:
        """Free slots."""
        return self._manager.tier_stats().num_free * self.page_size

    def alloc(self, need_size: int) -> Slots | None:
        """So many new slots, rounded up to pages: int32. None where not so many are free: `evict` makes room."""
        num_pages = -(-need_size // self.page_size)
        if self._manager.tier_stats().num_free < num_pages:
            return None
        try:
            return slots_of(self._manager.take(num_pages), self.page_size)
        except OutOfBlocksError:  # another thread was faster
            return None

    def extend(self, slots: Slots, num_tokens: int, need_size: int) -> Slots | None:
        """Slots for `num_tokens + need_size` tokens of a sequence that has `slots` for its first `num_tokens`: what is
        left of its last page is used up first. None where there is no room; nothing was changed then."""
        missing = num_tokens + need_size - len(slots)
        if missing <= 0:
            return slots
        new = self.alloc(missing)
        return None if new is None else np.concatenate([slots, new])

    def free(self, free_index: Slots) -> None:
        """The pages of these slots are free again.

        Raises:
            BlockOwnerError: one is not the caller's; nothing was freed.
        """
        pages = np.unique(np.asarray(free_index, np.int32) // self.page_size)
        self._manager.give_back(pages.tolist())


class ReqToTokenPool:
    """Rows of slots: `req_to_token[row, position]`, int32. One thread at a time."""

    def __init__(self, size: int, max_context_len: int) -> None:
        self.size, self.max_context_len = size, max_context_len
        self.req_to_token = np.zeros((size, max_context_len), np.int32)
        self._free = list(range(size - 1, -1, -1))

    def available_size(self) -> int:
        """Free rows."""
        return len(self._free)

    def alloc(self, need_size: int) -> list[int] | None:
        """So many rows, lowest first, or None."""
        if need_size > len(self._free):
            return None
        return [self._free.pop() for _ in range(need_size)]

    def check(self, row: int) -> None:
        """Raise `RequestError` unless a row is in use."""
        if row in self._free or not 0 <= row < self.size:
            raise RequestError(f"row {row} of {self.size} is not in use; free each once")

    def free(self, free_index: int | Sequence[int]) -> None:
        """Rows are free again; all of them or, on `RequestError`, none.

        Raises:
            RequestError: one is free already, is given twice, or there is none of that number.
        """
        rows = [int(row) for row in np.atleast_1d(np.asarray(free_index))]
        for row in rows:
            self.check(row)
        if len(set(rows)) < len(rows):
            raise RequestError(f"rows {rows} has one twice; free each once")
        self._free = sorted([*self._free, *rows], reverse=True)

    def write(self, row: int, start: int, slots: Slots) -> None:
        """Positions from `start` on of a row."""
        if start + len(slots) > self.max_context_len:
            raise RequestError(f"{start + len(slots)} tokens in a row; there is room for {self.max_context_len}")
        self.req_to_token[row, start : start + len(slots)] = slots
