"""A checkpoint on its way between its units on the device and its pages in the CPU tier: which bytes go where.

A checkpoint's image is packed: row after row, in each the layers in the model's order, in each layer its parts, in each
part all units. The image is cut into pages, which lie anywhere.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.errors import DeviceError, counted
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.kv.layout import Place, Places, RankLayout
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

STEP_BYTES = 16 * 2**20  # what a lane moves of an image before it looks for another task


ImageMove = Generator[None, None, int]  # yields between two steps of an image, and returns the bytes moved


class CheckpointImage(NamedTuple):
    """A checkpoint in both tiers: its units by row behind the full one, and its pages in their order."""

    units: tuple[Int32Array, ...]
    pages: Int32Array

    @classmethod
    def of(cls, task: TransferTask) -> CheckpointImage:
        """That of a task with units."""
        return cls(task.units, task.source_ids if task.kind is TaskKind.SWAP_IN else task.destination_ids)


class UnitPieces(NamedTuple):
    """So many bytes of each of these units, in one part of a layer. On the device the piece of unit u is at
    `offset_bytes + u * stride_bytes` of the segment; in the memory of all pages they follow each other from
    `memory_bytes` on."""

    segment: int
    offset_bytes: int
    stride_bytes: int
    units: Int32Array
    num_bytes: int
    memory_bytes: int

    @property
    def total_bytes(self) -> int:
        """What they have together."""
        return self.num_bytes * len(self.units)


class ImageStep(NamedTuple):
    """What is copied at a time: when it is done, the first `num_layers` layers of the model are in, among them those of
    which an image has nothing."""

    num_layers: int
    pieces: tuple[UnitPieces, ...]


class ImageMap:
    """Where the images of a device's checkpoints have their bytes. Immutable; any thread."""

    def __init__(self, layout: RankLayout, places: Places, num_pages: int) -> None:
        """`num_pages`: of the CPU tier, each as large as a full block."""
        self._layout, self._num_pages, self._page_bytes = layout, num_pages, layout.block_bytes
        self._num_rows = max(0, len(layout.rows) - 1)
        self._unit_bytes = [layout.unit_bytes(row) for row in range(1, len(layout.rows))]
        self._layers = [
            (
                number,
                row - 1,
                [
                    (place, part.num_bytes, layout.image_offset_bytes(number, index))
                    for index, (part, place) in enumerate(zip(layout.parts_of(number), places[number], strict=True))
                ],
            )
            for number in range(layout.num_layers)
            if (row := layout.row_of(number))
        ]

    def num_bytes(self, image: CheckpointImage) -> int:
        """Bytes of an image."""
        return sum(len(units) * size for units, size in zip(image.units, self._unit_bytes, strict=True))

    def steps(self, image: CheckpointImage) -> list[ImageStep]:
        """How it is copied, in the model's order of layers, at most `STEP_BYTES` at a time.

        Raises:
            DeviceError: it has units of other rows than the layout, an id outside its pool or twice, or another number
                of pages than its units fill.
        """
        self._check(image)
        begins = np.cumsum([0, *(len(ids) * size for ids, size in zip(image.units, self._unit_bytes, strict=True))])
        steps, pending, num_pending_bytes = list[ImageStep](), list[UnitPieces](), 0
        for number, row, parts in self._layers:
            units = image.units[row]
            for place, size, offset in parts if len(units) else ():
                for pieces in self._cut(place, size, units, int(begins[row]) + offset * len(units), image.pages):
                    if num_pending_bytes + pieces.total_bytes > STEP_BYTES:
                        steps.append(ImageStep(number, tuple(pending)))
                        pending, num_pending_bytes = [], 0
                    pending.append(pieces)
                    num_pending_bytes += pieces.total_bytes
        steps.append(ImageStep(self._layout.num_layers, tuple(pending)))
        return steps

    def _cut(self, place: Place, size: int, units: Int32Array, begin: int, pages: Int32Array) -> Iterator[UnitPieces]:
        """The units' bytes in one part, which are `begin` bytes into the image, cut where a page ends."""
        page_bytes, at, end = self._page_bytes, begin, begin + len(units) * size
        while at < end:
            page, in_page = divmod(at, page_bytes)
            first, in_unit = divmod(at - begin, size)
            memory_bytes, room = int(pages[page]) * page_bytes + in_page, min(end - at, page_bytes - in_page)
            num_whole = 0 if in_unit else min(room, STEP_BYTES) // size
            count, taken = (num_whole, size) if num_whole else (1, min(size - in_unit, room, STEP_BYTES))
            some = units[first : first + count]
            yield UnitPieces(place.segment, place.offset_bytes + in_unit, place.stride_bytes, some, taken, memory_bytes)
            at += count * taken

    def _check(self, image: CheckpointImage) -> None:
        if len(image.units) != self._num_rows:
            told = counted(len(image.units), "row")
            raise DeviceError(f"an image has units of {told}; the layout has {self._num_rows} behind the full one")
        for row, units in enumerate(image.units, 1):
            check_units(self._layout, row, units)
        _check_each("CPU pages", image.pages, self._num_pages)
        needed = -(-self.num_bytes(image) // self._page_bytes)
        if len(image.pages) != needed:
            told = f"an image of {self.num_bytes(image)} bytes has {counted(len(image.pages), 'page')}"
            raise DeviceError(f"{told}; it fills {needed}")


def check_units(layout: RankLayout, row: int, units: Int32Array) -> None:
    """Raise `DeviceError` for a unit outside the pool of its row, or given twice."""
    layer = next(number for number in range(layout.num_layers) if layout.row_of(number) == row)
    what = f"units of the row {str(layout.rows[row])!r} (layer {layer} is its first)"
    _check_each(what, units, layout.num_units[row - 1])


def _check_each(what: str, ids: Int32Array, num_all: int) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_all):
        raise DeviceError(f"{what} {ids.min()}..{ids.max()} leave the pool of {num_all}")
    if len(set(ids.tolist())) != len(ids):
        raise DeviceError(f"{what} have one twice: {ids.tolist()}")
