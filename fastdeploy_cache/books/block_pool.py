"""The blocks of one tier: which are free, and who owns each of the others."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from enum import IntEnum
from typing import NoReturn

import numpy as np

from fastdeploy_cache.errors import BlockOwnerError

_FEW = 96  # up to so many ids a Python loop beats NumPy's fixed cost of some microseconds


class Owner(IntEnum):
    """Every block id has exactly one."""

    FREE = 0
    RUN = 1
    REQUEST = 2
    TASK = 3
    CALLER = 4  # of an adapter: see `CallerBlocks`


FREE, RUN, REQUEST, TASK, CALLER = Owner  # looking a member up in its class costs as much as a dictionary


_WORDS = {FREE: "free", RUN: "cached", REQUEST: "a request's", TASK: "being copied into", CALLER: "a caller's own"}


class BlockPool:
    """Hands out ids 0..num_blocks-1, lowest first, and checks every hand-over. One thread at a time."""

    def __init__(self, tier: str, num_blocks: int) -> None:
        self.tier = tier
        self.num_blocks = num_blocks
        self._owners = bytearray(num_blocks)
        self._owner_array = np.frombuffer(self._owners, np.uint8)  # the same bytes, for many ids at once
        self._counts = [num_blocks, *(0 for owner in Owner if owner)]
        # ids from _next_unused on were never given out; a heap of all ids would cost microseconds per pop at a million
        self._next_unused = 0
        self._returned: list[int] = []  # a heap
        self._num_readers: dict[int, int] = {}  # blocks that something reads which does not keep them from being freed
        self._deferred: set[int] = set()  # of these, freed meanwhile: a task's until the last reader has gone

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""
        return self._counts[FREE]

    def count(self, owner: Owner) -> int:
        """Blocks of this owner."""
        return self._counts[owner]

    def owner(self, block_id: int) -> Owner:
        """Who owns a block."""
        return Owner(self._owners[block_id])

    def allocate(self, num_blocks: int, owner: Owner) -> array[int]:
        """The lowest `num_blocks` free ids, now of `owner`. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked of {self.num_free} free ones"
        returned = self._returned
        try:
            if num_blocks == 1 and returned:
                ids = array("i", (heapq.heappop(returned),))
            elif num_blocks * 8 < len(returned):
                ids = array("i", [heapq.heappop(returned) for _ in range(num_blocks)])
            else:  # many: a sorted list is a heap as well
                returned.sort()
                ids = array("i", returned[:num_blocks])
                del returned[:num_blocks]
            num_unused = num_blocks - len(ids)
            if num_unused:
                ids.extend(range(self._next_unused, self._next_unused + num_unused))
                self._next_unused += num_unused
        except BaseException:  # no memory: what has been taken off the heap already would be lost
            self._heap_free_ids()
            raise
        self._give(ids, owner)
        return ids

    def _heap_free_ids(self) -> None:
        """Make the heap anew from what the owners say. Walks the pool."""
        self._returned[:] = [i for i in range(self._next_unused) if self._owners[i] == FREE]  # sorted: a heap

    def claim(self, ids: array[int], owner: Owner) -> None:
        """Exactly these free ids, which have been given out before, are now of `owner`. Costs a walk over the heap."""
        claimed = set(ids)
        self._returned = [block_id for block_id in self._returned if block_id not in claimed]
        heapq.heapify(self._returned)
        self._give(ids, owner)

    def _give(self, ids: array[int], owner: Owner) -> None:
        """Note the owner of free ids."""
        if len(ids) <= _FEW:
            owners = self._owners
            for block_id in ids:
                owners[block_id] = owner
        else:
            self._owner_array[np.frombuffer(ids, np.int32)] = owner
        self._counts[FREE] -= len(ids)
        self._counts[owner] += len(ids)

    def check(self, ids: array[int], owner: Owner) -> None:
        """Raise `BlockOwnerError` for the first of `ids` that is not of `owner`, or is there twice."""
        known = all(0 <= i < self.num_blocks and self._owners[i] == owner for i in ids)
        if not known or len(set(ids)) < len(ids):
            self._refuse(ids, owner)

    def hand_over(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        """Change the owner of `ids`; all of them or, on `BlockOwnerError`, none."""
        if len(ids) > _FEW:
            self._hand_over_many(ids, giver, taker)
        else:
            owners, num_blocks = self._owners, self.num_blocks
            for i, block_id in enumerate(ids):
                if not (0 <= block_id < num_blocks and owners[block_id] == giver):  # a double is its taker's already
                    for changed in ids[:i]:
                        owners[changed] = giver
                    self._refuse(ids, giver)
                owners[block_id] = taker
        self._counts[giver] -= len(ids)
        self._counts[taker] += len(ids)

    def _hand_over_many(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        values = np.frombuffer(ids, np.uint32)  # a negative id is a large one here
        try:
            owners = self._owner_array[values].tobytes()
        except IndexError:
            self._refuse(ids, giver)
        rising = bool((values[1:] > values[:-1]).all())
        if owners.count(giver) != len(ids) or not (rising or len(np.unique(values)) == len(ids)):
            self._refuse(ids, giver)
        self._owner_array[values] = taker

    # -- reading without pinning

    @property
    def num_read(self) -> int:
        """Blocks that are being read and, if freed now, would not be free."""
        return len(self._num_readers) - len(self._deferred)

    def num_read_of(self, owner: Owner) -> int:
        """How many of these are an owner's. Walks over what is being read."""
        return sum(self._owners[block_id] == owner for block_id in self._num_readers)

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
                self._num_readers[block_id] = self._num_readers.get(block_id, 0) + 1
                num_begun += 1
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
                if block_id in self._deferred:
                    self._deferred.remove(block_id)
                    gone.append(block_id)
        if gone:
            self.free(gone, TASK)

    def _defer(self, ids: array[int], giver: Owner) -> array[int]:
        """Keep those of `ids` that are being read; returns the others, which are all the task's now."""
        self.hand_over(ids, giver, TASK)
        read = [block_id for block_id in ids if block_id in self._num_readers]
        self._deferred.update(read)
        return array("i", [block_id for block_id in ids if block_id not in self._num_readers])

    # -- ending

    def free(self, ids: array[int], giver: Owner) -> None:
        """Take `ids` back from their owner; all of them or, on `BlockOwnerError`, none."""
        if self._num_readers and not self._num_readers.keys().isdisjoint(ids):
            ids, giver = self._defer(ids, giver), TASK
        self.hand_over(ids, giver, FREE)
        returned = self._returned
        try:
            if len(ids) * 8 <= len(returned) + 8:
                for block_id in ids:
                    heapq.heappush(returned, block_id)
            else:
                returned.extend(ids)
                heapq.heapify(returned)
        except MemoryError:  # they are free whatever the heap says
            self._heap_free_ids()

    def free_ids(self) -> Iterable[int]:
        """Every free id, in no order."""
        yield from self._returned
        yield from range(self._next_unused, self.num_blocks)

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
