"""A checkpoint on its way between its units on the device and its pages in the CPU tier: which bytes go where.

A checkpoint's image is packed: row after row, in each the layers in the model's order, in each layer its parts, in each
part all units. The image is cut into pages, which lie anywhere.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_cache.errors import DeviceError, counted
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.kv.layout import Place, Places, RankLayout
from fastdeploy_cache.transfer_manager.task import LEFT_OUT, TaskKind, TransferTask

STEP_BYTES = 16 * 2**20  # what a lane moves of an image before it looks for another task
_MOST_PLANS = 256
ImageMove = Generator[None, None, int]  # yields between two steps of an image, and returns the bytes moved
Offsets = np.ndarray[Any, np.dtype[np.int64]]


class CheckpointImage(NamedTuple):
    """A checkpoint in both tiers: its units by row behind the full one, and its pages in their order. A load leaves out
    the units that are `LEFT_OUT`."""

    units: tuple[Int32Array, ...]
    pages: Int32Array

    @classmethod
    def of(cls, task: TransferTask) -> CheckpointImage:
        """That of a task with units."""
        return cls(task.units, task.source_ids if task.kind is TaskKind.SWAP_IN else task.destination_ids)


class UnitPieces(NamedTuple):
    """Pieces of units, one entry of each array for each: its segment of the device, where it begins there and in the
    memory of all pages, and how many bytes it has."""

    segments: Offsets
    device_bytes: Offsets
    memory_bytes: Offsets
    num_bytes: Offsets

    def part(self, begin: int, end: int) -> UnitPieces:
        """The entries from one up to another."""
        return UnitPieces(*(column[begin:end] for column in self))

    def only(self, which: np.ndarray[Any, np.dtype[np.bool_]]) -> UnitPieces:
        """The entries for which this is true."""
        return UnitPieces(*(column[which] for column in self))

    def shares(self, num_bytes: int) -> list[UnitPieces]:
        """The same in parts of about so many bytes or less, but for pieces that are larger."""
        return [self.part(*pair) for pair in _ranges(self.num_bytes, num_bytes)]


def _ranges(sizes: Offsets, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Where parts of about so many bytes begin and end: each has less than that and a piece together."""
    begins = np.flatnonzero(np.diff((np.cumsum(sizes) - 1) // num_bytes)) + 1
    return itertools.pairwise([0, *begins.tolist(), len(sizes)])


class ImageStep(NamedTuple):
    """What is copied at a time: when it is done, the first `num_layers` layers of the model are in, among them those of
    which an image has nothing."""

    num_layers: int
    pieces: UnitPieces


class ImageMap:
    """Where the images of a device's checkpoints have their bytes. One thread of each lane at a time."""

    def __init__(self, layout: RankLayout, places: Places, num_pages: int) -> None:
        """`num_pages`: of the CPU tier, each as large as a full block."""
        self._layout, self._num_pages, self._page_bytes = layout, num_pages, layout.block_bytes
        self._parts = [
            _RowPart(layer, row - 1, place, layout.image_offset_bytes(layer, index), part.num_bytes)
            for layer in range(layout.num_layers)
            if (row := layout.row_of(layer))
            for index, (part, place) in enumerate(zip(layout.parts_of(layer), places[layer], strict=True))
        ]
        self._unit_bytes = [layout.unit_bytes(row) for row in range(1, len(layout.rows))]
        self._plans: dict[tuple[int, ...], _Plan] = {}  # by how many units there are of each row

    def num_bytes(self, image: CheckpointImage) -> int:
        """What is moved of an image."""
        counts = [np.count_nonzero(units != LEFT_OUT) for units in image.units]
        return int(sum(count * size for count, size in zip(counts, self._unit_bytes, strict=True)))

    def rest(self, image: CheckpointImage) -> slice:
        """What an image that is stored leaves of its last page, in the memory of all pages. It is zeros then, or the
        page would keep, and take to storage, what somebody else had there."""
        if not len(image.pages):
            return slice(0, 0)
        end = (int(image.pages[-1]) + 1) * self._page_bytes
        return slice(end - -self.num_bytes(image) % self._page_bytes, end)

    def steps(self, kind: TaskKind, image: CheckpointImage) -> list[ImageStep]:
        """How it is copied, in the model's order of layers, about `STEP_BYTES` at a time and never more.

        Raises:
            DeviceError: it has units of other rows than the layout, an id outside its pool or twice, or another number
                of pages than its units fill; or it is stored, and one is left out.
        """
        self._check(image, may_leave_out=kind is TaskKind.SWAP_IN)
        counts = tuple(map(len, image.units))
        plan = self._plans.get(counts)
        if plan is None:
            if len(self._plans) >= _MOST_PLANS:
                self._plans = {}
            plan = self._plans[counts] = _Plan.of(self._parts, counts, self._unit_bytes, self._page_bytes)
        return plan.steps(image, self._page_bytes, self._layout.num_layers)

    def _check(self, image: CheckpointImage, *, may_leave_out: bool) -> None:
        if len(image.units) != len(self._unit_bytes):
            told, num_rows = counted(len(image.units), "row"), len(self._unit_bytes)
            raise DeviceError(f"an image has units of {told}; the layout has {num_rows} behind the full one")
        for row, units in enumerate(image.units, 1):
            check_units(self._layout, row, units[units != LEFT_OUT] if may_leave_out else units)
        _check_each(lambda: "CPU pages", image.pages, self._num_pages)
        num_bytes = sum(len(units) * size for units, size in zip(image.units, self._unit_bytes, strict=True))
        needed = -(-num_bytes // self._page_bytes)
        if len(image.pages) != needed:
            told = f"an image of {num_bytes} bytes has {counted(len(image.pages), 'page')}"
            raise DeviceError(f"{told}; it fills {needed}")


class _RowPart(NamedTuple):
    """One part of one layer behind the full row."""

    layer: int
    row: int
    place: Place
    offset_bytes: int  # in the image of one unit
    num_bytes: int  # of one unit


class _Plan(NamedTuple):
    """The pieces of every image with as many units of each row: one entry of each array for each piece."""

    segments: Offsets
    begins: Offsets  # on the device, of unit 0
    strides: Offsets
    unit_places: Offsets  # which unit it is of, counted over all rows
    page_places: Offsets
    in_pages: Offsets  # where it begins in its page
    num_bytes: Offsets
    parts: tuple[tuple[int, int, int], ...]  # of each step its pieces, and the layer behind those that it ends

    @classmethod
    def of(cls, parts: Sequence[_RowPart], counts: Sequence[int], unit_bytes: Sequence[int], page_bytes: int) -> _Plan:
        """A unit's bytes in one part follow each other in the image, and are cut where a page ends; and inside one, at
        equal distances, where a page has more bytes than a step."""
        sizes = [count * size for count, size in zip(counts, unit_bytes, strict=True)]
        row_begins, first_units = ([0, *itertools.accumulate(each)] for each in (sizes, counts))
        rows = [
            (
                number,
                first_units[part.row] + unit,
                row_begins[part.row] + counts[part.row] * part.offset_bytes + unit * part.num_bytes,
            )
            for number, part in enumerate(parts)
            for unit in range(counts[part.row])
        ]
        numbers, units, in_image = np.array(rows, np.int64).reshape(len(rows), 3).T
        table = [(part.layer, *part.place[:3], part.num_bytes) for part in parts]
        layers, segments, begins, strides, wide = np.array(table, np.int64).reshape(len(table), 5)[numbers].T
        num_cuts = -(-page_bytes // STEP_BYTES)
        cut_bytes = -(-page_bytes // num_cuts)

        def cut_of(offsets: Offsets) -> Offsets:
            return np.asarray(offsets // page_bytes * num_cuts + offsets % page_bytes // cut_bytes)

        first = cut_of(in_image)
        repeats = cut_of(in_image + wide - 1) - first + 1
        which = np.repeat(np.arange(len(rows)), repeats)
        cut = np.arange(len(which)) - np.repeat(np.cumsum(repeats) - repeats - first, repeats)
        pages = cut // num_cuts
        start = np.maximum(in_image[which], pages * page_bytes + cut % num_cuts * cut_bytes)
        end = pages * page_bytes + np.minimum((cut % num_cuts + 1) * cut_bytes, page_bytes)
        num_bytes = np.minimum(in_image[which] + wide[which], end) - start
        step_bytes = STEP_BYTES - int(num_bytes.max(initial=1)) + 1
        behind = [*layers[which].tolist(), max(layers, default=0) + 1]
        return cls(
            segments[which],
            begins[which] + start - in_image[which],
            strides[which],
            units[which],
            pages,
            start - pages * page_bytes,
            num_bytes,
            tuple((begin, end, behind[end]) for begin, end in _ranges(num_bytes, step_bytes)),
        )

    def steps(self, image: CheckpointImage, page_bytes: int, num_layers: int) -> list[ImageStep]:
        """Those of one image."""
        units = np.concatenate(image.units).astype(np.int64)
        on_device = self.begins + self.strides * units[self.unit_places]
        in_memory = image.pages.astype(np.int64)[self.page_places] * page_bytes + self.in_pages
        pieces = UnitPieces(self.segments, on_device, in_memory, self.num_bytes)
        found = [ImageStep(behind, pieces.part(begin, end)) for begin, end, behind in self.parts]
        if LEFT_OUT in units:
            wanted = [units[self.unit_places[begin:end]] != LEFT_OUT for begin, end, _ in self.parts]
            found = [each._replace(pieces=each.pieces.only(which)) for each, which in zip(found, wanted, strict=True)]
        found[-1] = found[-1]._replace(num_layers=num_layers)
        return found


def check_units(layout: RankLayout, row: int, units: Int32Array) -> None:
    """Raise `DeviceError` for a unit outside the pool of its row, or given twice."""
    _check_each(lambda: _named(layout, row), units, layout.num_units[row - 1])


def _named(layout: RankLayout, row: int) -> str:
    layer = next(number for number in range(layout.num_layers) if layout.row_of(number) == row)
    return f"units of the row {str(layout.rows[row])!r} (layer {layer} is its first)"


def _check_each(what: Callable[[], str], ids: Int32Array, num_all: int) -> None:
    listed = ids.tolist()
    if listed and not (min(listed) >= 0 and max(listed) < num_all):
        raise DeviceError(f"{what()} {min(listed)}..{max(listed)} leave the pool of {num_all}")
    if len(set(listed)) != len(listed):
        raise DeviceError(f"{what()} have one twice: {listed}")
