"""Which pieces of memory make up a block, put together so that few copies move many of them."""

from __future__ import annotations

from typing import NamedTuple

from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout

# Smaller steps are slower: a call costs what copying 8 KiB does, and short pieces miss the processor's prefetching.
# A block that lies in one piece loses most; scattered pieces are slow anyway, and then more steps give more overlap.
_MIN_STEP_BYTES = {"layer_first": 64 * 1024, "block_first": 256 * 1024}


class Strip(NamedTuple):
    """Equal pieces of each block: on the device `num_rows`, `row_stride_bytes` apart, in its image side by side.

    The first piece of block b is at `offset_bytes + b * block_stride_bytes` of the segment.
    """

    segment: int
    offset_bytes: int
    block_stride_bytes: int
    num_rows: int
    row_stride_bytes: int
    row_bytes: int
    image_offset_bytes: int


class Step(NamedTuple):
    """What is copied of all blocks before the next layers: when it is done, the first `num_layers` layers are in."""

    num_layers: int
    strips: tuple[Strip, ...]


def load_steps(layout: RankLayout, places: Places) -> tuple[Step, ...]:
    """Steps of a load: a layer each where layers are large, of several layers where they are small."""
    layers_per_step = min(layout.num_layers, -(-_MIN_STEP_BYTES[layout.device_order] // layout.layer_bytes))
    firsts = range(0, layout.num_layers, layers_per_step)
    return tuple(_step(layout, places, first, min(first + layers_per_step, layout.num_layers)) for first in firsts)


def whole_step(layout: RankLayout, places: Places) -> tuple[Step, ...]:
    """All layers at once: nobody waits for a part of a store."""
    return (_step(layout, places, 0, layout.num_layers),)


def leading_strips(layout: RankLayout, places: Places, num_tokens: int | None) -> list[Strip]:
    """The strips of the first `num_tokens` tokens of each block, or of all, in every layer and part, without images."""
    strips = []
    for in_layer in places:
        for part, place in zip(layout.parts, in_layer, strict=True):
            stripe = part.num_bytes // part.num_stripes
            width = stripe if num_tokens is None else part.leading_bytes(num_tokens)
            start, stride = place.offset_bytes, place.stride_bytes
            strips.append(Strip(place.segment, start, stride, part.num_stripes, stripe, width, 0))
    return strips


def _step(layout: RankLayout, places: Places, first: int, end: int) -> Step:
    strips: list[Strip] = []
    for layer in range(first, end):
        for index, (part, place) in enumerate(zip(layout.parts, places[layer], strict=True)):
            image_offset = layout.image_offset_bytes(layer, index)
            piece = Strip(
                place.segment, place.offset_bytes, place.stride_bytes, 1, part.num_bytes, part.num_bytes, image_offset
            )
            joined = _joined(strips[-1], piece) if strips else None
            if joined is None:
                strips.append(piece)
            else:
                strips[-1] = joined
    return Step(end, tuple(_folded(strips)))


def _joined(strip: Strip, piece: Strip) -> Strip | None:
    """One wider piece, where the second begins at the end of the first."""
    same = (strip.segment, strip.block_stride_bytes) == (piece.segment, piece.block_stride_bytes)
    if not same or strip.offset_bytes + strip.row_bytes != piece.offset_bytes:
        return None
    width = strip.row_bytes + piece.row_bytes
    return strip._replace(row_bytes=width, row_stride_bytes=width)


def _folded(strips: list[Strip]) -> list[Strip]:
    """Equal pieces at equal distances become rows of one strip."""
    folded: list[Strip] = []
    for piece in strips:
        last = folded[-1] if folded else None
        if last is not None and _same_kind(last, piece):
            distance = piece.offset_bytes - last.offset_bytes - (last.num_rows - 1) * last.row_stride_bytes
            if distance > 0 and (last.num_rows == 1 or distance == last.row_stride_bytes):
                folded[-1] = last._replace(num_rows=last.num_rows + 1, row_stride_bytes=distance)
                continue
        folded.append(piece)
    return folded


def _same_kind(a: Strip, b: Strip) -> bool:
    return (a.segment, a.block_stride_bytes, a.row_bytes) == (b.segment, b.block_stride_bytes, b.row_bytes)
