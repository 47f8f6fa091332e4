"""SGLang's pools: token slots on the GPU, and each request's row of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.adapters.slots.pages import (
    Given,
    Integers,
    Slots,
    as_array,
    as_int32_tensor,
    as_int64_tensor,
    as_integers,
    slots_of,
)
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.manager import PrefixCacheManager


class TokenToKVPoolAllocator:
    """Token slots, a page at a time. They are the caller's until `free`, or until the cache adopts them.

    One thread at a time. Slots come as int32 arrays, or as int64 CPU tensors with `as_tensors`.
    """

    device = "cpu"  # where slots are; their pages are where the manager's blocks are

    def __init__(self, manager: PrefixCacheManager, *, as_tensors: bool = False) -> None:
        self._manager = manager
        self.page_size = manager.config.block_size
        self.size = manager.blocks.view.tier_stats().num_blocks * self.page_size
        self._given: Given = as_int64_tensor if as_tensors else as_array
        self._freed: list[Integers] | None = None  # in a group

    def available_size(self) -> int:
        """Free slots."""
        return self._manager.blocks.view.tier_stats().num_free * self.page_size

    def alloc(self, need_size: int) -> Any:
        """So many new slots, rounded up to pages. None where not so many are free: `evict` makes room."""
        pages = self._take(-(-need_size // self.page_size))
        return None if pages is None else self._given(slots_of(pages, self.page_size))

    def _take(self, num_pages: int) -> list[int] | None:
        if self._manager.blocks.view.tier_stats().num_free < num_pages:
            return None
        try:
            return self._manager.blocks.allocate(num_pages)
        except OutOfBlocksError:  # another thread was faster
            return None

    def extend(self, slots: Integers, num_tokens: int, need_size: int) -> Any:
        """Slots for `num_tokens + need_size` tokens of a sequence that has `slots` for its first `num_tokens`: what is
        left of its last page is used up first. None where there is no room; nothing was changed then."""
        missing = num_tokens + need_size - len(slots)
        if missing <= 0:
            return slots
        pages = self._take(-(-missing // self.page_size))
        if pages is None:
            return None
        return self._given(np.concatenate([as_integers(slots).astype(np.int32), slots_of(pages, self.page_size)]))

    def alloc_extend(
        self, prefix_lens: Integers, seq_lens: Integers, last_loc: Integers, extend_num_tokens: int
    ) -> Any:
        """Slots for the tokens [prefix_len, seq_len) of each sequence, one sequence after the other.

        What is left of the page of its `last_loc`, the slot of its last token, is used up first. None where there is no
        room; nothing was changed then.

        Raises:
            RequestError: they are not of as many sequences, or the lengths do not add up to `extend_num_tokens`.
        """
        size, starts, ends, last = self.page_size, *map(as_integers, (prefix_lens, seq_lens, last_loc))
        if not len(starts) == len(ends) == len(last) or (starts > ends).any():
            raise RequestError(
                f"{len(starts)} prefix_lens, {len(ends)} seq_lens, {len(last)} last_loc; "
                "give each for every sequence, and no prefix longer than its sequence"
            )
        if int((ends - starts).sum()) != extend_num_tokens:
            raise RequestError(f"{(ends - starts).sum()} tokens of these lengths, {extend_num_tokens} asked for")
        num_pages = -(-ends // size) - -(-starts // size)
        pages = self._take(int(num_pages.sum()))
        if pages is None:
            return None
        slots, first = [np.empty(0, np.int32)], 0
        for start, end, loc, num in zip(*(a.tolist() for a in (starts, ends, last, num_pages)), strict=True):
            num_left = min(end, -(-start // size) * size) - start
            slots.append(np.arange(loc + 1, loc + 1 + num_left, dtype=np.int32))
            slots.append(slots_of(pages[first : first + num], size)[: end - start - num_left])
            first += num
        return self._given(np.concatenate(slots))

    def alloc_decode(self, seq_lens: Integers, last_loc: Integers) -> Any:
        """A slot for the last token of each sequence, behind `last_loc`; `seq_lens` count it. None: no room."""
        ends = as_integers(seq_lens)
        return self.alloc_extend(ends - 1, ends, last_loc, len(ends))

    def free(self, free_index: Integers) -> None:
        """The pages of these slots are free again; inside a group, at its end.

        Raises:
            BlockOwnerError: one is not the caller's; nothing was freed.
        """
        if self._freed is not None:
            self._freed.append(as_integers(free_index))
            return
        pages = np.unique(as_integers(free_index).astype(np.int32) // self.page_size)
        self._manager.blocks.free(pages.tolist())

    def free_group_begin(self) -> None:
        """What is freed from here on is freed at once by `free_group_end`."""
        self._freed = []

    def free_group_end(self) -> None:
        """See `free_group_begin`, and `free` for what it raises."""
        freed, self._freed = self._freed or [], None
        if freed:
            self.free(np.concatenate(freed))

    def clear(self) -> None:
        """Leave the group. Slots need nothing else: `HiRadixCache.reset` frees what is cached, and what a request holds
        is freed by it."""
        self._freed = None


class ReqToTokenPool:
    """Rows of slots: `req_to_token[row, position]`, int32; a CPU tensor with `as_tensors`. One thread at a time."""

    device = "cpu"

    def __init__(self, size: int, max_context_len: int, *, as_tensors: bool = False) -> None:
        self.size, self.max_context_len = size, max_context_len
        self._rows = np.zeros((size, max_context_len), np.int32)
        self.req_to_token: Any = as_int32_tensor(self._rows) if as_tensors else self._rows
        self.free_slots = list(range(size))

    def available_size(self) -> int:
        """Free rows."""
        return len(self.free_slots)

    def alloc(self, need_size: int) -> list[int] | None:
        """So many rows, those first that have been free for longest, or None."""
        if need_size > len(self.free_slots):
            return None
        taken, self.free_slots = self.free_slots[:need_size], self.free_slots[need_size:]
        return taken

    def check(self, row: int) -> None:
        """Raise `RequestError` unless a row is in use."""
        if row in self.free_slots or not 0 <= row < self.size:
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
        self.free_slots += rows

    def clear(self) -> None:
        """All rows are free."""
        self.free_slots = list(range(self.size))

    def write(self, indices: Any, values: Integers) -> None:
        """`req_to_token[indices] = values`, where `indices` is a row and a slice of it, or rows and positions.

        Raises:
            RequestError: there is no such place, or not room for as many.
        """
        places = tuple(i if isinstance(i, int | slice) else np.asarray(i) for i in indices)
        given = as_integers(values)
        try:
            room = self._rows[places]
        except IndexError as error:
            raise RequestError(
                f"rows have {self.max_context_len} places, and there are {self.size}: {error}"
            ) from error
        if room.size != given.size:
            raise RequestError(f"{given.size} slots for {room.size} places; a row has {self.max_context_len}")
        self._rows[places] = given

    def row(self, row: int, num_tokens: int) -> Slots:
        """A copy of the slots of a row's first tokens."""
        return self._rows[row, :num_tokens].copy()
