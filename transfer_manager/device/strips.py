"""Which pieces of memory make up a block, put together so that few copies move many of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout

_MIN_STEP_BYTES = 256 * 1024  # of a block: a call costs what copying 4 KiB does, and waits for another thread's


class Rows(NamedTuple):
    """So many pieces, or groups of pieces, at equal distances on the device, and at others in the image."""

    num: int
    stride_bytes: int
    image_stride_bytes: int


class Strip(NamedTuple):
    """Pieces of `row_bytes` of each block, in `rows` of rows: those of the layers, and of keys and values in each.

    The first piece of block b is at `offset_bytes + b * block_stride_bytes` of the segment.
    """

    segment: int
    offset_bytes: int
    block_stride_bytes: int
    row_bytes: int
    image_offset_bytes: int = 0
    rows: tuple[Rows, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return math.prod(self.shape)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of a block's pieces as an array of bytes."""
        return (*(rows.num for rows in self.rows), self.row_bytes)

    @property
    def strides(self) -> tuple[int, ...]:
        """The strides of that array on the device."""
        return (*(rows.stride_bytes for rows in self.rows), 1)

    @property
    def image_strides(self) -> tuple[int, ...]:
        """The strides of that array in the image."""
        return (*(rows.image_stride_bytes for rows in self.rows), 1)


class Step(NamedTuple):
    """What is copied of all blocks before the next layers: when it is done, the first `num_layers` layers are in."""

    num_layers: int
    strips: tuple[Strip, ...]


def load_steps(layout: RankLayout, places: Places) -> tuple[Step, ...]:
    """Steps of a load: a layer each where layers are large, of several layers where they are small."""
    mean_bytes = layout.block_bytes // layout.num_layers or 1
    layers_per_step = min(layout.num_layers, -(-_MIN_STEP_BYTES // mean_bytes))
    firsts = range(0, layout.num_layers, layers_per_step)
    return tuple(_step(layout, places, first, min(first + layers_per_step, layout.num_layers)) for first in firsts)


def whole_step(layout: RankLayout, places: Places) -> tuple[Step, ...]:
    """All layers at once: nobody waits for a part of a store."""
    return (_step(layout, places, 0, layout.num_layers),)


def leading_strips(layout: RankLayout, places: Places, num_tokens: int | None, row: int = 0) -> list[Strip]:
    """The strips of the first `num_tokens` tokens of each block, or of all, in every layer and part of a row, without
    images."""
    strips = []
    for layer, in_layer in enumerate(places):
        if layout.row_of(layer) != row:
            continue
        for part, place in zip(layout.parts_of(layer), in_layer, strict=True):
            stripe = part.num_bytes // part.num_stripes
            width = stripe if num_tokens is None else part.leading_bytes(num_tokens)
            rows = (Rows(part.num_stripes, stripe, stripe),)
            strips.append(Strip(place.segment, place.offset_bytes, place.stride_bytes, width, rows=rows))
    return strips


def _step(layout: RankLayout, places: Places, first: int, end: int) -> Step:
    pieces: list[Strip] = []
    for layer in range(first, end):
        if layout.row_of(layer):  # it has no part of a block
            continue
        for index, (part, place) in enumerate(zip(layout.parts_of(layer), places[layer], strict=True)):
            image_offset = layout.image_offset_bytes(layer, index)
            piece = Strip(place.segment, place.offset_bytes, place.stride_bytes, part.num_bytes, image_offset)
            joined = _joined(pieces[-1], piece) if pieces else None
            if joined is None:
                pieces.append(piece)
            else:
                pieces[-1] = joined
    strips = _folded(pieces, 1)
    by_layer = _folded(strips, max(1, len(strips) // (end - first)))
    return Step(end, tuple(by_layer if len(by_layer) < len(strips) else strips))


def _joined(strip: Strip, piece: Strip) -> Strip | None:
    """One wider piece, where the second begins at the end of the first."""
    same = (strip.segment, strip.block_stride_bytes) == (piece.segment, piece.block_stride_bytes)
    if not same or strip.offset_bytes + strip.row_bytes != piece.offset_bytes:
        return None
    return strip._replace(row_bytes=strip.row_bytes + piece.row_bytes)


def _folded(strips: Sequence[Strip], every: int) -> list[Strip]:
    """Equal strips at equal distances become rows of one: each with the one so many places behind it."""
    folded: list[Strip] = []
    for first in range(every):
        run: list[Strip] = []
        for strip in strips[first::every]:
            if run and not _goes_on(run, strip):
                folded.append(_in_rows(run))
                run = []
            run.append(strip)
        folded += [_in_rows(run)] if run else []
    return folded


def _goes_on(run: Sequence[Strip], strip: Strip) -> bool:
    """Whether a strip is like those of a run, and as far from the last as these are from each other."""
    last = run[-1]
    if last._replace(offset_bytes=0, image_offset_bytes=0) != strip._replace(offset_bytes=0, image_offset_bytes=0):
        return False
    distance = _distance(last, strip)
    return distance[0] > 0 and (len(run) == 1 or distance == _distance(run[-2], last))


def _in_rows(run: Sequence[Strip]) -> Strip:
    first = run[0]
    return first._replace(rows=(Rows(len(run), *_distance(*run[:2])), *first.rows)) if len(run) > 1 else first


def _distance(strip: Strip, other: Strip) -> tuple[int, int]:
    """On the device, and in the image."""
    return other.offset_bytes - strip.offset_bytes, other.image_offset_bytes - strip.image_offset_bytes
