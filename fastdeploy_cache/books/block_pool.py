"""The blocks of one tier: which are free, and who owns each of the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from enum import IntEnum
from typing import NoReturn

import numpy as np

from fastdeploy_cache.books.id_table import IdTable, new_id_table
from fastdeploy_cache.errors import BlockOwnerError


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

    def __init__(self, tier: str, num_blocks: int, new_table: Callable[[int], IdTable] = new_id_table) -> None:
        self.tier = tier
        self.num_blocks = num_blocks
        self._table = new_table(num_blocks)
        self.count: Callable[[Owner], int] = self._table.count  # blocks of this owner
        self.num_free = num_blocks  # that `allocate` can give: of the counts, the one that every verb looks at
        self._num_readers: dict[int, int] = {}  # blocks that something reads which does not keep them from being freed
        self.num_read = 0  # blocks that are being read and, if freed now, would not be free
        self._num_read_of = [0 for _ in Owner]  # how many of these each owner has
        self._deferred: set[int] = set()  # of these, freed meanwhile: a task's until the last reader has gone

    def owner(self, block_id: int) -> Owner:
        """Who owns a block."""
        return Owner(self._table.owners[block_id])

    # -- giving

    def allocate(self, num_blocks: int, owner: Owner) -> array[int]:
        """The lowest `num_blocks` free ids, now of `owner`. The caller has checked `num_free`."""
        ids = self._table.take(num_blocks, owner)
        self.num_free = self._table.num_free
        return ids

    def check(self, ids: array[int], owner: Owner) -> None:
        """Raise `BlockOwnerError` for the first of `ids` that is not of `owner`, or is there twice."""
        if not self._table.move(ids, owner, owner):
            self._refuse(ids, owner)

    def hand_over(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        """Change the owner of `ids`, none of them free; all of them or, on `BlockOwnerError`, none."""
        if not self._table.move(ids, giver, taker):
            self._refuse(ids, giver)
        if self._num_readers:
            num_read = sum(map(self._num_readers.__contains__, ids))
            self._num_read_of[giver] -= num_read
            self._num_read_of[taker] += num_read

    # -- reading without pinning

    def num_read_of(self, owner: Owner) -> int:
        """How many of the blocks that are being read are an owner's."""
        return self._num_read_of[owner]

    def ids_of(self, owner: Owner) -> list[int]:
        """Every id of an owner; a walk over the pool."""
        return np.flatnonzero(np.frombuffer(self._table.owners, np.uint8) == owner).tolist()

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
                    self._num_read_of[self._table.owners[block_id]] += 1
                    self.num_read += 1
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
                self._num_read_of[self._table.owners[block_id]] -= 1
                if block_id in self._deferred:
                    self._deferred.remove(block_id)
                    gone.append(block_id)
                else:
                    self.num_read -= 1
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
        self.num_read -= len(read)
        return unread

    # -- ending

    def free(self, ids: array[int], giver: Owner) -> None:
        """Take `ids` back from their owner; all of them or, on `BlockOwnerError`, none."""
        if self._num_readers and not self._num_readers.keys().isdisjoint(ids):
            ids, giver = self._defer(ids, giver), TASK
        if not self._table.move(ids, giver, FREE):
            self._refuse(ids, giver)
        self.num_free = self._table.num_free

    def _refuse(self, ids: array[int], giver: Owner) -> NoReturn:
        """Name the first id of `ids` that its giver may not give."""
        seen = set()
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise BlockOwnerError(f"{self.tier} has no block {block_id}; ids are 0 to {self.num_blocks - 1}")
            if self._table.owners[block_id] != giver or block_id in seen:
                owner = "given twice" if block_id in seen else _WORDS[self.owner(block_id)]
                raise BlockOwnerError(
                    f"{self.tier} block {block_id} is {owner}, not {_WORDS[giver]}; give each back once, by its owner"
                )
            seen.add(block_id)
        raise AssertionError("nothing to refuse")
