"""Strips: together they are every byte of every block's image, at its place on the device."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable
from typing import Literal

import numpy as np
import pytest

from fastdeploy_cache.transfer_manager.device import strips
from fastdeploy_cache.transfer_manager.device.strips import Step, load_steps, whole_step
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, Place, Places, RankLayout
from fastdeploy_cache.transfer_manager.kv.parts import KVPart

NUM_BLOCKS = 5
SEGMENT = 10**9  # device addresses are segment * SEGMENT + offset
ODD = (KVPart("key", (3, 2, 5), "float16"), KVPart("scale", (3,), "float32", None), KVPart("value", (7,), "int8"))
ODD_LAYOUT = RankLayout(num_layers=4, parts=ODD)
MODEL = KVLayout(num_layers=6, num_kv_heads=2, head_dim=8).for_rank(1, 4)
BLOCK_FIRST = KVLayout(num_layers=6, num_kv_heads=2, head_dim=8, device_order="block_first").for_rank(1, 4)
EXTRA = KVLayout(num_layers=3, num_kv_heads=2, head_dim=8, num_extra_layers=2, extra_layer_block_ratio=1.5)
SCALED = KVLayout(num_layers=3, num_kv_heads=4, head_dim=16, dtype="float16", scale_dtype="float32", scale_elements=8)
SCALED = SCALED.for_rank(1, 4)
PART = MODEL.parts[0].num_bytes
LARGE = RankLayout(num_layers=5, parts=(KVPart("latent", (256 * 1024,), "int8"),))


def _arrays(key: tuple[int, int], value: tuple[int, int], stride: int) -> tuple[Place, ...]:
    """Of one layer: (segment, offset) of its key and its value."""
    return tuple(Place(segment, offset, stride, NUM_BLOCKS) for segment, offset in (key, value))


SPAN = NUM_BLOCKS * PART  # one array
UNLIKE = tuple((Place(i, 0, 3 * PART, NUM_BLOCKS), Place(i, PART, 6 * PART, NUM_BLOCKS)) for i in range(6))
CASES: dict[str, tuple[RankLayout, Places]] = {
    "another stride for values": (MODEL, UNLIKE),
    "layer first": (MODEL, MODEL.places(NUM_BLOCKS)),
    "layer first, room for one block": (MODEL, MODEL.places(1)),
    "block first": (BLOCK_FIRST, BLOCK_FIRST.places(NUM_BLOCKS)),
    "odd sizes": (ODD_LAYOUT, ODD_LAYOUT.places(NUM_BLOCKS)),
    "extra layers": (EXTRA.for_rank(1, 4), EXTRA.for_rank(1, 4).places(NUM_BLOCKS)),
    "scales": (SCALED, SCALED.places(NUM_BLOCKS)),
    "large layers": (LARGE, LARGE.places(NUM_BLOCKS)),
    "a segment for each array": (MODEL, tuple(_arrays((2 * i, 0), (2 * i + 1, 0), PART) for i in range(6))),
    "a segment for each layer": (MODEL, tuple(_arrays((i, 0), (i, SPAN), PART) for i in range(6))),
    "blocks of key and value": (MODEL, tuple(_arrays((i, 0), (i, PART), 2 * PART) for i in range(6))),
    "values before keys": (MODEL, tuple(_arrays((i, PART), (i, 0), 2 * PART) for i in range(6))),
    "layers backwards": (
        MODEL,
        tuple(_arrays((0, 2 * i * SPAN), (0, (2 * i + 1) * SPAN), PART) for i in range(6)[::-1]),
    ),
    "two segments in turn": (MODEL, tuple(_arrays((i % 2, i * SPAN), (i % 2, (i + 9) * SPAN), PART) for i in range(6))),
    "uneven distances": (
        MODEL,
        tuple(_arrays((0, i * i * 40 * SPAN), (0, (i * i * 40 + 3) * SPAN), PART) for i in range(6)),
    ),
    "gaps between blocks": (
        MODEL,
        tuple(_arrays((0, 3 * i * PART), (0, (3 * i + 1) * PART), 99 * PART) for i in range(6)),
    ),
    "another stride in each layer": (
        MODEL,
        tuple(_arrays((0, i * 10**6), (0, i * 10**6 + PART), (i + 2) * PART) for i in range(6)),
    ),
}


def wanted(layout: RankLayout, places: Places, block: int) -> np.ndarray:
    """The device address of each byte of a block's image."""
    addresses = np.full(layout.block_bytes, -1, np.int64)
    for layer, index in itertools.product(range(layout.num_layers), range(len(layout.parts))):
        place, num_bytes = places[layer][index], layout.parts[index].num_bytes
        start = layout.image_offset_bytes(layer, index)
        first = place.segment * SEGMENT + place.offset_bytes + block * place.stride_bytes
        addresses[start : start + num_bytes] = first + np.arange(num_bytes)
    assert (addresses >= 0).all()
    return addresses


def stripped(steps: tuple[Step, ...], layout: RankLayout, block: int) -> tuple[np.ndarray, np.ndarray]:
    """By the strips: the device address of each byte of a block's image, and by how many strips it is copied."""
    addresses, uses = np.full(layout.block_bytes, -1, np.int64), np.zeros(layout.block_bytes, np.int32)
    for strip in (strip for step in steps for strip in step.strips):
        first = strip.segment * SEGMENT + strip.offset_bytes + block * strip.block_stride_bytes
        nums = [range(rows.num) for rows in strip.rows]
        for at in itertools.product(*nums):
            start = strip.image_offset_bytes + sum(map(operator.mul, at, strip.image_strides))
            image = slice(start, start + strip.row_bytes)
            assert image.stop <= layout.block_bytes
            addresses[image] = first + sum(map(operator.mul, at, strip.strides)) + np.arange(strip.row_bytes)
            uses[image] += 1
    return addresses, uses


@pytest.mark.parametrize("make", [load_steps, whole_step])
@pytest.mark.parametrize("name", CASES)
def test_every_byte_of_an_image_is_copied_once(
    name: str, make: Callable[[RankLayout, Places], tuple[Step, ...]]
) -> None:
    """For each block, each byte of its image meets its own byte on the device, and no byte is copied twice."""
    layout, places = CASES[name]
    for block in range(min(place.num_blocks for in_layer in places for place in in_layer)):
        addresses, uses = stripped(make(layout, places), layout, block)
        assert (uses == 1).all()
        assert (addresses == wanted(layout, places, block)).all()


@pytest.mark.parametrize("name", CASES)
def test_steps_rise_to_all_layers(name: str) -> None:
    """A step's strips are exactly the bytes of the layers since the step before; the last one is the last layer's."""
    layout, places = CASES[name]
    before = 0
    for step in load_steps(layout, places):
        assert step.num_layers > before
        _, uses = stripped((step,), layout, 0)
        expected = np.zeros_like(uses)
        expected[before * layout.layer_bytes : step.num_layers * layout.layer_bytes] = 1
        assert (uses == expected).all()
        before = step.num_layers
    assert before == layout.num_layers
    assert [step.num_layers for step in whole_step(layout, places)] == [layout.num_layers]


@pytest.mark.parametrize("order", ["layer_first", "block_first"])
@pytest.mark.parametrize(
    ("layers_in_step", "num_layers", "told"),
    [
        (0.25, 3, [1, 2, 3]),
        (1, 4, [1, 2, 3, 4]),
        (1.01, 5, [2, 4, 5]),
        (2.5, 10, [3, 6, 9, 10]),
        (4, 8, [4, 8]),
        (60, 40, [40]),
        (60, 1, [1]),
    ],
)
def test_small_layers_share_a_step(
    order: Literal["layer_first", "block_first"], layers_in_step: float, num_layers: int, told: list[int]
) -> None:
    """A large layer is a step of its own; of small ones as many are together as make up the least worth a step."""
    layer_bytes = int(strips._MIN_STEP_BYTES / layers_in_step)
    parts = (KVPart("latent", (layer_bytes,), "int8"),)
    layout = RankLayout(num_layers=num_layers, parts=parts, device_order=order)
    assert [step.num_layers for step in load_steps(layout, layout.places(2))] == told


@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("layer first", [(12, PART)]),
        ("block first", [(12 * PART,)]),
        ("layer first, room for one block", [(12 * PART,)]),
        ("blocks of key and value", [(2 * PART,)] * 6),
        ("a segment for each layer", [(2, PART)] * 6),
        ("gaps between blocks", [(6, 2 * PART)]),
        ("odd sizes", [(4, part.num_bytes) for part in ODD]),
        ("scales", [(3, 2, 4 * PART), (3, 2, PART)]),
        ("another stride in each layer", [(2 * PART,)] * 6),
        ("layers backwards", [(2, PART)] * 6),
        ("values before keys", [(PART,)] * 12),  # rows rise: addresses are unsigned
        ("another stride for values", [(PART,)] * 12),
    ],
)
def test_equal_and_adjoining_pieces_become_one_strip(name: str, shapes: list[tuple[int, ...]]) -> None:
    """Few strips move many pieces: adjoining ones as a wider row, equal ones at equal distances as rows, of rows."""
    (step,) = whole_step(*CASES[name])
    assert [strip.shape for strip in step.strips] == shapes
