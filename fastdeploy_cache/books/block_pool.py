"""The blocks of one tier: which are free, and who owns each of the others."""

from __future__ import annotations

import heapq
from array import array
from bisect import bisect_left
from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NoReturn

import numpy as np

from fastdeploy_cache.errors import BlockOwnerError

_FEW = 24  # up to so many scattered ids a Python loop beats NumPy's fixed cost of some microseconds
_MIN_ROW = 8  # free ids in a row that are worth an entry of their own
_MANY = 4  # to sort so many times the ids that come or go costs no more than to push or pop each of these
_SHIFT = 32  # of a row's first id in its entry; its end is below
_END = (1 << _SHIFT) - 1


class Owner(IntEnum):
    """Every block id has exactly one."""

    FREE = 0
    RUN = 1
    REQUEST = 2
    TASK = 3
    CALLER = 4  # of an adapter: see `CallerBlocks`


FREE, RUN, REQUEST, TASK, CALLER = Owner  # looking a member up in its class costs as much as a dictionary


_WORDS = {FREE: "free", RUN: "cached", REQUEST: "a request's", TASK: "being copied into", CALLER: "a caller's own"}
_BYTES = tuple([bytes([owner]) for owner in Owner])  # by owner: what stands for it


class BlockPool:
    """Hands out ids 0..num_blocks-1, lowest first, and checks every hand-over. One thread at a time.

    Ids that follow one another (a row) are checked, handed over, freed and given as a slice, however many they are.
    """

    def __init__(self, tier: str, num_blocks: int) -> None:
        self.tier = tier
        self.num_blocks = num_blocks
        self._owners = bytearray(num_blocks)
        self._owner_array = np.frombuffer(self._owners, np.uint8)  # the same bytes, for many ids at once
        self._numbers = array("i")  # 0, 1, 2, ...: a row is equal to a slice of these
        self._numbers.frombytes(np.arange(num_blocks, dtype=np.int32).tobytes())
        self._counts = [num_blocks, *(0 for owner in Owner if owner)]
        self.num_free = num_blocks  # that `allocate` can give: of the counts, the one that every verb looks at
        # Each free id is in one of two heaps: by itself, or in a row whose first id and end are packed in one integer.
        self._singles: list[int] = []
        self._rows = [num_blocks] if num_blocks else []
        self._num_readers: dict[int, int] = {}  # blocks that something reads which does not keep them from being freed
        self._num_read_of = [0 for _ in Owner]  # how many of these each owner has
        self._deferred: set[int] = set()  # of these, freed meanwhile: a task's until the last reader has gone

    def count(self, owner: Owner) -> int:
        """Blocks of this owner."""
        return self._counts[owner]

    def owner(self, block_id: int) -> Owner:
        """Who owns a block."""
        return Owner(self._owners[block_id])

    # -- giving

    def allocate(self, num_blocks: int, owner: Owner) -> array[int]:
        """The lowest `num_blocks` free ids, now of `owner`. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked of {self.num_free} free ones"
        if not num_blocks:
            return array("i")
        rows, singles, owners = self._rows, self._singles, self._owners
        row = rows[0] if rows else self.num_blocks << _SHIFT
        first = row >> _SHIFT
        last = first + num_blocks
        has_singles = singles and singles[0] < first
        try:
            if last <= row & _END and not has_singles:
                ids = self._take_row(num_blocks)
                owners[first:last] = _BYTES[owner] * num_blocks
            elif num_blocks == 1:
                ids = array("i", (heapq.heappop(singles),))
                owners[ids[0]] = owner
            else:
                ids = self._take_singles(num_blocks, first) if has_singles else array("i")
                if len(ids) < num_blocks:
                    self._take_more(ids, num_blocks)
                if num_blocks <= _FEW:
                    for block_id in ids:
                        owners[block_id] = owner
                else:
                    self._owner_array[_places(ids)] = owner
        except BaseException:  # no memory: what has been taken off the heaps already would be lost
            self._heap_free_ids()
            raise
        self._counts[FREE] -= num_blocks
        self.num_free = self._counts[FREE]
        self._counts[owner] += num_blocks
        return ids

    def _take_row(self, at_most: int) -> array[int]:
        """The front of the lowest row, off its heap."""
        row = self._rows[0]
        first, end = row >> _SHIFT, row & _END
        if first + at_most < end:
            end = first + at_most
            self._rows[0] = row + (at_most << _SHIFT)  # still the lowest
        else:
            heapq.heappop(self._rows)
        return self._numbers[first:end]

    def _take_singles(self, at_most: int, end: int) -> array[int]:
        """The lowest of the free ids that are by themselves, off their heap: those below `end`; there is one."""
        singles = self._singles
        if at_most * _MANY >= len(singles):  # a sorted list is a heap as well
            singles.sort()
            ids = singles[:at_most]
            if ids[-1] >= end:
                del ids[bisect_left(ids, end) :]
            del singles[: len(ids)]
        else:
            ids = [heapq.heappop(singles) for _ in range(at_most)]
            while ids[-1] >= end:
                heapq.heappush(singles, ids.pop())
        return array("i", ids)

    def _take_more(self, ids: array[int], num_blocks: int) -> None:
        """The lowest free ids off both heaps, in turns, until there are `num_blocks`."""
        rows, singles = self._rows, self._singles
        while (num_left := num_blocks - len(ids)) > 0:
            if singles and (not rows or singles[0] < rows[0] >> _SHIFT):
                ids.append(heapq.heappop(singles))
            else:
                ids += self._take_row(num_left)

    def _heap_free_ids(self) -> None:
        """Make the heaps anew from what the owners say. Walks the pool."""
        edges = np.flatnonzero(np.diff(self._owner_array == FREE, prepend=False, append=False))
        self._rows[:] = ((edges[::2] << _SHIFT) | edges[1::2]).tolist()  # sorted: a heap
        self._singles.clear()

    def check(self, ids: array[int], owner: Owner) -> None:
        """Raise `BlockOwnerError` for the first of `ids` that is not of `owner`, or is there twice."""
        if not ids:
            return
        if not self._is_row(ids):
            self._check_scattered(ids, owner)
        elif self._owners.count(owner, ids[0], ids[-1] + 1) != len(ids):
            self._refuse(ids, owner)

    def _check_scattered(self, ids: array[int], owner: Owner) -> np.ndarray[Any, np.dtype[np.intp]]:
        """The same for ids that do not follow one another; returns them as places in the owners."""
        places = _places(ids)
        try:
            owners = self._owner_array[places].tobytes()
        except IndexError:
            self._refuse(ids, owner)
        is_rising = False not in (places[1:] > places[:-1]).tobytes()
        if owners.count(owner) != len(ids) or not (is_rising or _are_different(places)):
            self._refuse(ids, owner)
        return places

    def _is_row(self, ids: array[int]) -> bool:
        """Whether these are ids that follow one another; they are some of the pool's, then."""
        first, last = ids[0], ids[-1]
        return last - first == len(ids) - 1 and self._numbers[first : last + 1] == ids

    def hand_over(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        """Change the owner of `ids`, none of them free; all of them or, on `BlockOwnerError`, none."""
        num_blocks, owners = len(ids), self._owners
        if num_blocks >= _MIN_ROW and self._is_row(ids):
            first, end = ids[0], ids[0] + num_blocks
            if owners.count(giver, first, end) != num_blocks:
                self._refuse(ids, giver)
            owners[first:end] = _BYTES[taker] * num_blocks
        elif num_blocks > _FEW:
            self._owner_array[self._check_scattered(ids, giver)] = taker
        else:
            num_all = self.num_blocks
            for i, block_id in enumerate(ids):
                if not (0 <= block_id < num_all and owners[block_id] == giver):  # a double is its taker's already
                    for changed in ids[:i]:
                        owners[changed] = giver
                    self._refuse(ids, giver)
                owners[block_id] = taker
        self._counts[giver] -= num_blocks
        self._counts[taker] += num_blocks
        if self._num_readers:
            num_read = sum(map(self._num_readers.__contains__, ids))
            self._num_read_of[giver] -= num_read
            self._num_read_of[taker] += num_read

    def take_back(self, ids: array[int], giver: Owner) -> None:
        """Undo a `hand_over` to a run, where memory ran out behind it: one by one, which takes none."""
        owners = self._owners
        for block_id in ids:
            owners[block_id] = giver
            if block_id in self._num_readers:
                self._num_read_of[RUN] -= 1
                self._num_read_of[giver] += 1
        self._counts[RUN] -= len(ids)
        self._counts[giver] += len(ids)

    # -- reading without pinning

    @property
    def num_read(self) -> int:
        """Blocks that are being read and, if freed now, would not be free."""
        return len(self._num_readers) - len(self._deferred)

    def num_read_of(self, owner: Owner) -> int:
        """How many of the blocks that are being read are an owner's."""
        return self._num_read_of[owner]

    def ids_of(self, owner: Owner) -> list[int]:
        """Every id of an owner; a walk over the pool."""
        return np.flatnonzero(self._owner_array == owner).tolist()

    @property
    def deferred_ids(self) -> list[int]:
        """Blocks that were freed and are still being read."""
        return list(self._deferred)

    def begin_reading(self, ids: array[int]) -> None:
        """Something slow reads these: their owner may free them any time, but they are given out only after
        `end_reading`."""
        num_begun = 0
        try:
            for block_id in ids:
                num_readers = self._num_readers.get(block_id, 0)
                self._num_readers[block_id] = num_readers + 1
                num_begun += 1
                if not num_readers:
                    self._num_read_of[self._owners[block_id]] += 1
        except BaseException:
            self.end_reading(ids[:num_begun])
            raise

    def end_reading(self, ids: array[int]) -> None:
        """Nobody reads them any more on behalf of that call."""
        gone = array("i")
        for block_id in ids:
            self._num_readers[block_id] -= 1
            if not self._num_readers[block_id]:
                del self._num_readers[block_id]
                self._num_read_of[self._owners[block_id]] -= 1
                if block_id in self._deferred:
                    self._deferred.remove(block_id)
                    gone.append(block_id)
        if gone:
            self.free(gone, TASK)

    def unread(self, ids: array[int]) -> array[int]:
        """Those that nothing reads."""
        readers = self._num_readers
        return array("i", [block_id for block_id in ids if block_id not in readers]) if readers else ids

    def _defer(self, ids: array[int], giver: Owner) -> array[int]:
        """Keep those of `ids` that are being read; returns the others, which are all the task's now."""
        unread = self.unread(ids)
        read = set(ids).difference(unread)
        self.check(ids, giver)  # a double would not be one's who gives to itself
        self.hand_over(ids, giver, TASK)
        self._deferred.update(read)
        return unread

    # -- ending

    def free(self, ids: array[int], giver: Owner) -> None:
        """Take `ids` back from their owner; all of them or, on `BlockOwnerError`, none."""
        if self._num_readers and not self._num_readers.keys().isdisjoint(ids):
            ids, giver = self._defer(ids, giver), TASK
        self.hand_over(ids, giver, FREE)
        self.num_free = self._counts[FREE]
        num_blocks, singles = len(ids), self._singles
        try:
            if num_blocks >= _MIN_ROW and self._is_row(ids):
                heapq.heappush(self._rows, ids[0] << _SHIFT | ids[0] + num_blocks)
            elif num_blocks * _MANY <= len(singles) + _MANY:
                for block_id in ids:
                    heapq.heappush(singles, block_id)
            else:
                singles.extend(ids)
                singles.sort()
        except MemoryError:  # they are free whatever the heaps say
            self._heap_free_ids()

    def free_ids(self) -> Iterable[int]:
        """Every free id, in no order."""
        yield from self._singles
        for row in self._rows:
            yield from range(row >> _SHIFT, row & _END)

    def _refuse(self, ids: array[int], giver: Owner) -> NoReturn:
        """Name the first id of `ids` that its giver may not give."""
        seen = set()
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise BlockOwnerError(f"{self.tier} has no block {block_id}; ids are 0 to {self.num_blocks - 1}")
            if self._owners[block_id] != giver or block_id in seen:
                owner = "given twice" if block_id in seen else _WORDS[self.owner(block_id)]
                raise BlockOwnerError(
                    f"{self.tier} block {block_id} is {owner}, not {_WORDS[giver]}; give each back once, by its owner"
                )
            seen.add(block_id)
        raise AssertionError("nothing to refuse")


def _are_different(places: np.ndarray[Any, np.dtype[Any]]) -> bool:
    """No place is there twice. `np.unique` would import a part of NumPy at its first call, for 40 ms under the lock."""
    in_order = np.sort(places)
    return True not in (in_order[1:] == in_order[:-1]).tobytes()


def _places(ids: array[int]) -> np.ndarray[Any, np.dtype[np.intp]]:
    """Ids as indices of the kind that NumPy is fast with; a negative id is a large one there."""
    return np.frombuffer(ids, np.uint32).astype(np.intp)
