"""The units of one row on the GPU: which are free, whose the others are, and how many checkpoints hold each."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from fastdeploy_cache.books.block_pool import RUN, BlockPool, Owner
from fastdeploy_cache.books.run import ID_BYTES
from fastdeploy_cache.errors import BlockOwnerError


class UnitPool:
    """A pool of units. Windows of neighbouring checkpoints overlap, so one unit may be held by several: the last that
    lets it go frees it. Under the lock.

    Attributes:
        pool: the units and their owners; what checkpoints hold is `RUN`'s.
        num_pinned: units that a pinned checkpoint holds.
    """

    def __init__(self, name: str, num_units: int) -> None:
        self.pool = BlockPool(name, num_units)
        self._holders = array("i", bytes(ID_BYTES * num_units))
        self._pins = array("i", bytes(ID_BYTES * num_units))
        self.num_pinned = 0
        self._one = array("i", [0])  # a unit that goes home

    @property
    def num_available(self) -> int:
        """Units that are free or can be had from checkpoints now."""
        return self.pool.num_free + self.pool.count(RUN) - self.num_pinned

    def is_held(self, unit: int) -> bool:
        """Whether a checkpoint holds this one."""
        return self._holders[unit] > 0

    def num_holders(self, unit: int) -> int:
        """How many checkpoints hold it, for checks."""
        return self._holders[unit]

    def num_pins(self, unit: int) -> int:
        """How many pinned checkpoints hold it."""
        return self._pins[unit]

    def take(self, units: array[int], giver: Owner) -> None:
        """A checkpoint holds these from now on: each is `giver`'s, or held by another checkpoint already. All of them
        or, on `MemoryError`, none; on `AssertionError`, too, which says that one is there twice or is nobody's."""
        holders = self._holders
        assert len(set(units)) == len(units), f"units {list(units)} of {self.pool.name} have one twice"
        fresh = array("i", [unit for unit in units if not holders[unit]])
        if fresh:
            try:
                self.pool.hand_over(fresh, giver, RUN)
            except BlockOwnerError as error:
                raise AssertionError(f"a checkpoint is to hold what is not its giver's: {error}") from error
        for unit in units:
            holders[unit] += 1

    def hand_back(self, units: array[int], taker: Owner) -> None:
        """The reverse of `take`: what nobody else holds is `taker`'s. Needs no memory."""
        for unit in units:
            self._holders[unit] -= 1
            if not self.is_held(unit):
                self._one[0] = unit
                self.pool.hand_over(self._one, RUN, taker)

    def let_go(self, units: Iterable[int]) -> None:
        """A checkpoint holds these no more. Needs no memory."""
        holders, one = self._holders, self._one
        for unit in units:
            num_left = holders[unit] - 1
            assert num_left >= 0, f"unit {unit} of {self.pool.name} is let go, and nobody holds it"
            holders[unit] = num_left
            if not num_left:
                one[0] = unit
                self.pool.free(one, RUN)

    def pin(self, units: Iterable[int]) -> None:
        """A pinned checkpoint holds these. Needs no memory."""
        pins, num_new = self._pins, 0
        for unit in units:
            num_pins = pins[unit]
            pins[unit] = num_pins + 1
            if not num_pins:
                num_new += 1
        self.num_pinned += num_new

    def unpin(self, units: Iterable[int]) -> None:
        """The reverse."""
        pins, num_gone = self._pins, 0
        for unit in units:
            num_pins = pins[unit] - 1
            assert num_pins >= 0, f"unit {unit} of {self.pool.name} is unpinned, and nobody pins it"
            pins[unit] = num_pins
            if not num_pins:
                num_gone += 1
        self.num_pinned -= num_gone
