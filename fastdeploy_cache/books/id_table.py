"""Who owns each block of a pool, and which are free: the plain part of `BlockPool`, native where that was built."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Final, Protocol, Union

Ids = Union["array[int]", memoryview]  # of blocks, as numbers of four bytes
_FREE, _NUM_OWNERS = 0, 6  # of `Owner`
_MOVING = 0xFF  # of nobody, while ids are moved: so that one that is given twice is seen


class IdTable(Protocol):
    """The ids 0..num_blocks-1, at first all free. One thread at a time.

    Attributes:
        owners: a byte for each block; only to look at.
        num_free: how many are free.
    """

    @property
    def owners(self) -> bytearray: ...
    @property
    def num_free(self) -> int: ...

    def count(self, owner: int, /) -> int:
        """How many blocks an owner has."""
        ...

    def take(self, num_blocks: int, owner: int, /) -> array[int]:
        """The lowest free ids, in order, for an owner; `ValueError` where there are fewer."""
        ...

    def move(self, ids: Ids, giver: int, taker: int, /) -> bool:
        """Give ids from one owner to another, or to the same. Takes no memory.

        False where one of them is not the giver's, or is there twice: then nothing has changed.
        """
        ...


class IdTableInPython:
    """See `IdTable`."""

    def __init__(self, num_blocks: int) -> None:
        self.owners = bytearray(num_blocks)
        self._counts = [num_blocks, *(0 for _ in range(1, _NUM_OWNERS))]
        self._low = 0  # no block below is free

    @property
    def num_free(self) -> int:
        """See `IdTable`."""
        return self._counts[_FREE]

    def count(self, owner: int, /) -> int:
        """See `IdTable`."""
        return self._counts[owner]

    def take(self, num_blocks: int, owner: int, /) -> array[int]:
        """See `IdTable`."""
        if not 0 <= num_blocks <= self._counts[_FREE] or not _FREE < owner < _NUM_OWNERS:
            raise ValueError(f"{num_blocks} blocks for owner {owner} of {self._counts[_FREE]} free ones")
        ids, owners, block = array("i", (0,)) * num_blocks, self.owners, self._low
        for place in range(num_blocks):
            block = owners.find(_FREE, block)
            ids[place], owners[block] = block, owner
        self._low = block
        self._counts[_FREE] -= num_blocks
        self._counts[owner] += num_blocks
        return ids

    def move(self, ids: Ids, giver: int, taker: int, /) -> bool:
        """See `IdTable`."""
        if not (0 <= giver < _NUM_OWNERS and 0 <= taker < _NUM_OWNERS):
            raise ValueError(f"from owner {giver} to {taker}; an owner is 0 to {_NUM_OWNERS - 1}")
        owners, num_blocks, num_good = self.owners, len(self.owners), 0
        for block in ids:
            if not 0 <= block < num_blocks or owners[block] != giver:
                break
            owners[block] = _MOVING
            num_good += 1
        is_good = num_good == len(ids)
        for place in range(num_good):
            block = ids[place]
            owners[block] = taker if is_good else giver
            if is_good and taker == _FREE and block < self._low:
                self._low = block
        if is_good:
            self._counts[giver] -= num_good
            self._counts[taker] += num_good
        return is_good


_new: Callable[[int], IdTable]
try:
    from fastdeploy_cache._native import IdTable as Native

    _new = Native
except ImportError:  # it was not built
    _new = IdTableInPython
new_id_table: Final[Callable[[int], IdTable]] = _new  # the faster one, of so many blocks
