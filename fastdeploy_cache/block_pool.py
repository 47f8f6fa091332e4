"""The blocks of one tier: which are free, and who owns each of the others."""

from __future__ import annotations

import heapq
from array import array
from collections.abc import Iterable
from enum import IntEnum

from fastdeploy_cache.errors import BlockOwnerError


class Owner(IntEnum):
    """Every block id has exactly one."""

    FREE = 0
    RUN = 1
    REQUEST = 2
    TASK = 3


class BlockPool:
    """Hands out ids 0..num_blocks-1, lowest first, and checks every hand-over. One thread at a time."""

    def __init__(self, tier: str, num_blocks: int) -> None:
        self.tier = tier
        self.num_blocks = num_blocks
        self._owners = bytearray(num_blocks)
        self._counts = [num_blocks, *(0 for owner in Owner if owner)]
        # ids from _next_unused on were never given out; a heap of all ids would cost microseconds per pop at a million
        self._next_unused = 0
        self._returned: list[int] = []

    @property
    def num_free(self) -> int:
        """Blocks that `allocate` can give."""
        return self._counts[Owner.FREE]

    def count(self, owner: Owner) -> int:
        """Blocks of this owner."""
        return self._counts[owner]

    def owner(self, block_id: int) -> Owner:
        """Who owns a block."""
        return Owner(self._owners[block_id])

    def allocate(self, num_blocks: int, owner: Owner) -> array[int]:
        """The lowest `num_blocks` free ids, now of `owner`. The caller has checked `num_free`."""
        assert num_blocks <= self.num_free, f"{num_blocks} blocks asked of {self.num_free} free ones"
        num_returned = min(num_blocks, len(self._returned))
        ids = array("i", (heapq.heappop(self._returned) for _ in range(num_returned)))
        end = self._next_unused + num_blocks - num_returned
        ids.extend(range(self._next_unused, end))
        self._next_unused = end
        self._set(ids, Owner.FREE, owner)
        return ids

    def hand_over(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        """Change the owner of `ids`; all of them or, on `BlockOwnerError`, none."""
        self._check(ids, giver)
        self._set(ids, giver, taker)

    def free(self, ids: array[int], giver: Owner) -> None:
        """Take `ids` back from their owner; all of them or, on `BlockOwnerError`, none."""
        self.hand_over(ids, giver, Owner.FREE)
        for block_id in ids:
            heapq.heappush(self._returned, block_id)

    def free_ids(self) -> Iterable[int]:
        """Every free id, in no order."""
        yield from self._returned
        yield from range(self._next_unused, self.num_blocks)

    def _check(self, ids: array[int], giver: Owner) -> None:
        seen = set()
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise BlockOwnerError(f"{self.tier} has no block {block_id}; ids are 0 to {self.num_blocks - 1}")
            if self._owners[block_id] != giver or block_id in seen:
                owner = "given twice" if block_id in seen else f"owned by {self.owner(block_id).name}"
                raise BlockOwnerError(
                    f"{self.tier} block {block_id} is {owner}, not {giver.name}; give each back once, by its owner"
                )
            seen.add(block_id)

    def _set(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        for block_id in ids:
            self._owners[block_id] = taker
        self._counts[giver] -= len(ids)
        self._counts[taker] += len(ids)
