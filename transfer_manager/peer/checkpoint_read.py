"""How far the reading of one checkpoint's units is, row by row and layer by layer. Pure."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.ipc.codec import Int32Array, unpack_int32
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout


class UnitStep(NamedTuple):
    """Units of one row, here and there, in layers [first_layer, end_layer) of the model."""

    row: int
    mine: Int32Array
    theirs: Int32Array
    first_layer: int
    end_layer: int


class CheckpointRead:
    """The units of the checkpoint behind so many blocks of an offer. They are read once the owner has named its own,
    which are read and never written until the offer is over."""

    def __init__(self, layout: RankLayout, num_blocks: int, units: bytes) -> None:
        """`units`: into which they are read, row by row, as `why_no_units` allows them."""
        self._layout, self._num_blocks = layout, num_blocks
        self._mine = _by_row(layout, num_blocks, units)
        self._theirs: list[Int32Array] = []
        self._row, self._layer = 1, 0  # from there on nothing has been read

    @property
    def is_done(self) -> bool:
        """Everything has been read."""
        return bool(self._theirs) and self._row == len(self._layout.rows)

    def note(self, units: bytes) -> bool:
        """The owner's word, which never changes: these are its units. False where they are of another boundary."""
        if len(units) != sum(ids.nbytes for ids in self._mine):
            return False
        if not self._theirs:
            self._theirs = _by_row(self._layout, self._num_blocks, units)
            self._go_on()
        return True

    def next_step(self, max_bytes: int) -> UnitStep | None:
        """What to read next: layers of one row with at most so many bytes (at least one layer)."""
        if not self._theirs or self.is_done:
            return None
        layout, row, end, num_bytes = self._layout, self._row, self._layer, 0
        mine, theirs = self._mine[row - 1], self._theirs[row - 1]
        while end < layout.num_layers:
            if layout.row_of(end) == row:
                num_bytes += len(mine) * sum(part.num_bytes for part in layout.parts_of(end))
                if num_bytes > max_bytes and end > self._layer:
                    break
            end += 1
        return UnitStep(row, mine, theirs, self._layer, end)

    def note_read(self, step: UnitStep) -> None:
        """It has been read."""
        self._layer = step.end_layer
        self._go_on()

    def _go_on(self) -> None:
        """Find the next layer of the row, or the next row of which there is a unit."""
        layout, num_layers = self._layout, self._layout.num_layers
        while self._row < len(layout.rows):
            of_row = (each for each in range(self._layer, num_layers) if layout.row_of(each) == self._row)
            layer = next(of_row, None) if len(self._mine[self._row - 1]) else None
            if layer is not None:
                self._layer = layer
                return
            self._row, self._layer = self._row + 1, 0


def _by_row(layout: RankLayout, num_blocks: int, units: bytes) -> list[Int32Array]:
    ends = [*accumulate(row.num_units_at(num_blocks) for row in layout.rows[1:])]
    return np.split(unpack_int32(units), ends[:-1])


def why_no_units(layout: RankLayout, num_blocks: int, units: bytes) -> str | None:
    """Why these cannot be the units of a checkpoint behind so many blocks in this rank's memory; None: they can."""
    num_wanted = sum(row.num_units_at(num_blocks) for row in layout.rows[1:])
    if not layout.rows or len(units) != 4 * num_wanted:
        return f"{len(units)} bytes of units for a checkpoint of {num_wanted} behind {num_blocks} blocks"
    for ids, num_units, row in zip(_by_row(layout, num_blocks, units), layout.num_units, layout.rows[1:], strict=True):
        outside = ids[(ids < 0) | (ids >= num_units)]
        if len(outside):
            return f"unit {outside[0]} of the row {str(row)!r} is outside a pool of {num_units}"
    return None
