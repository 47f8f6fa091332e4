"""Sizes and places of a block's bytes."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.transfer_manager.kv.layout import (
    MAX_LAYERS,
    STORAGE_DTYPES,
    KVLayout,
    KVPart,
    Place,
    Places,
    RankLayout,
)

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}
ITEM_BYTES |= {"uint8": 1, "int4": 0.5}
UNEVEN = RankLayout(
    num_layers=3,
    parts=(KVPart("key", (4, 2, 8), "float16"), KVPart("scale", (4,), "float32"), KVPart("v", (5,), "int8")),
)

GOOD: dict[str, object] = {"num_layers": 3, "num_kv_heads": 2, "head_dim": 8, "dtype": "float16"}
LATENT: dict[str, object] = {"num_kv_heads": 1, "head_dim": 12, "value_head_dim": 0}
SCALED: dict[str, object] = {"dtype": "int8", "scale_dtype": "float32", "scale_elements": 4}
KINDS: dict[str, dict[str, object]] = {
    "layer first": {},
    "latent": LATENT,
    "values of another size": {"value_head_dim": 6},
    "scales": SCALED,
    "int4, heads first": {"dtype": "int4", "scale_dtype": "bfloat16", "heads_first": True},
    "extra layers": {"num_extra_layers": 2, "extra_layer_block_ratio": 1.5},
    "extra layers, as many blocks": {"num_extra_layers": 1},
    "only one main layer": {"num_layers": 1, "num_extra_layers": 3, "extra_layer_block_ratio": 2.3},
    "block first": {"device_order": "block_first", "num_extra_layers": 1},
    "block first, latent": LATENT | {"device_order": "block_first"},
    "block first, scales": SCALED | {"device_order": "block_first", "value_head_dim": 12},
}


def layout_of(fields: Mapping[str, object]) -> KVLayout:
    """The good layout with some fields changed."""
    return KVLayout(**(GOOD | dict(fields)))  # type: ignore[arg-type]


LAYOUTS = {name: layout_of(fields).for_rank(1, 4) for name, fields in KINDS.items()}
LAYOUTS["odd sizes"] = UNEVEN
LAYOUTS["odd sizes, block first"] = RankLayout(num_layers=2, parts=UNEVEN.parts, device_order="block_first")


@pytest.mark.parametrize("dtype", STORAGE_DTYPES)
def test_block_bytes(dtype: str) -> None:
    """A block is layers x (key and value) x tokens x heads of the rank x head_dim x bytes of an element."""
    layout = KVLayout(num_layers=5, num_kv_heads=8, head_dim=16, dtype=dtype).for_rank(tp_size=2, block_size=64)
    assert layout.block_bytes == 5 * 2 * 64 * 4 * 16 * ITEM_BYTES[dtype]
    assert layout.layer_bytes * 5 == layout.block_bytes
    assert [part.shape for part in layout.parts] == [(64, 4, 16)] * 2


def test_sizes_do_not_overflow_32_bits() -> None:
    """Sizes of large models are exact."""
    layout = KVLayout(num_layers=128, num_kv_heads=128, head_dim=256, dtype="float32").for_rank(1, 1024)
    assert layout.block_bytes == 128 * 2 * 1024 * 128 * 256 * 4 == 2**35


@pytest.mark.parametrize(("heads", "tp_size", "per_rank"), [(8, 1, 8), (8, 8, 1), (12, 3, 4), (2, 8, 1), (1, 16, 1)])
def test_heads_are_shared_out_or_replicated(heads: int, tp_size: int, per_rank: int) -> None:
    """Heads are divided among the ranks; where there are fewer than ranks each rank holds one."""
    layout = KVLayout(num_layers=1, num_kv_heads=heads, head_dim=4)
    assert layout.heads_per_rank(tp_size) == per_rank
    assert layout.for_rank(tp_size, 2).parts[0].shape == (2, per_rank, 4)


@pytest.mark.parametrize(("heads", "tp_size"), [(8, 3), (3, 8), (6, 4)])
def test_heads_that_do_not_divide_are_refused(heads: int, tp_size: int) -> None:
    """The message has both numbers."""
    with pytest.raises(LayoutError, match=f"{heads} KV heads.*{tp_size} ranks"):
        KVLayout(num_layers=1, num_kv_heads=heads, head_dim=4).heads_per_rank(tp_size)


@pytest.mark.parametrize(
    ("field", "value"), [("num_layers", 0), ("num_kv_heads", -1), ("head_dim", 0), ("dtype", "float12")]
)
def test_impossible_layouts_are_refused(field: str, value: object) -> None:
    """The message names the field and the value seen."""
    good: dict[str, object] = {"num_layers": 1, "num_kv_heads": 1, "head_dim": 1, "dtype": "int8"}
    with pytest.raises(LayoutError, match=rf"layout\.{field}.*{value}"):
        KVLayout(**(good | {field: value}))  # type: ignore[arg-type]


def test_impossible_shares_are_refused() -> None:
    """No ranks and blocks of no tokens are errors of ours."""
    layout = KVLayout(num_layers=1, num_kv_heads=1, head_dim=1)
    with pytest.raises(LayoutError, match="tp_size is 0"):
        layout.for_rank(0, 16)
    with pytest.raises(LayoutError, match="block_size is 0"):
        layout.for_rank(1, 0)


def test_image_pieces_tile_a_block() -> None:
    """Inside an image the parts follow each other layer by layer: no gap, no overlap, to the last byte."""
    places = [
        (UNEVEN.image_offset_bytes(layer, part), UNEVEN.parts[part].num_bytes)
        for layer, part in itertools.product(range(3), range(3))
    ]
    assert [start for start, _ in places] == [0, *itertools.accumulate(size for _, size in places)][:-1]
    assert sum(size for _, size in places) == UNEVEN.block_bytes == 3 * (128 + 16 + 5)


def test_views_tile_a_ranks_memory() -> None:
    """Every byte of the KV memory belongs to exactly one element of one view, with the part's shape and dtype."""
    memory = np.zeros(UNEVEN.gpu_bytes(7), np.uint8)
    views = UNEVEN.kv_views([memory], UNEVEN.places(7))
    assert [list(layer) for layer in views] == [["key", "scale", "v"]] * 3
    for layer in views:
        for part in UNEVEN.parts:
            assert layer[part.name].shape == (7, *part.shape) and layer[part.name].dtype == part.storage_dtype
            layer[part.name].view(np.uint8)[...] += 1
    assert set(memory.tolist()) == {1}


def test_a_pool_fills_the_memory_that_is_given() -> None:
    """8 heads of 256 float16, one layer, one token a block: 8 KiB a block, so many of them in 4 GiB and in 2000 KiB."""
    layout = KVLayout(num_layers=1, num_kv_heads=8, head_dim=256, dtype="float16").for_rank(1, 1)
    assert layout.block_bytes == 8192
    for num_blocks_in in (layout.num_gpu_blocks_in, layout.num_cpu_blocks_in):
        assert num_blocks_in(4 * 2**30) == 524288
        assert num_blocks_in(2000 * 1024) == 250
        assert [num_blocks_in(num_bytes) for num_bytes in (0, 8191, 8192, 16383)] == [0, 0, 1, 1]


def test_a_latent_is_one_part_on_every_rank() -> None:
    """Without values there is one part, and each of eight ranks holds all of it."""
    layout = KVLayout(num_layers=61, num_kv_heads=1, head_dim=576, value_head_dim=0, dtype="bfloat16")
    shares = [layout.for_rank(tp_size, 64) for tp_size in (1, 8)]
    assert shares[0] == shares[1]
    assert [(part.name, part.shape, part.storage_dtype) for part in shares[1].parts] == [
        ("latent", (64, 1, 576), "uint16")
    ]
    assert shares[1].block_bytes == 61 * 64 * 576 * 2


def test_values_may_have_another_size_than_keys() -> None:
    """Each part has its own elements, and a layer is both."""
    layout = layout_of({"head_dim": 192, "value_head_dim": 128}).for_rank(2, 16)
    assert {part.name: part.shape for part in layout.parts} == {"key": (16, 1, 192), "value": (16, 1, 128)}
    assert layout.layer_bytes == 16 * (192 + 128) * 2


@pytest.mark.parametrize(
    ("fields", "shapes"),
    [
        ({}, {"key_scale": (4, 2, 1), "value_scale": (4, 2, 1)}),
        ({"scale_elements": 4}, {"key_scale": (4, 2, 2), "value_scale": (4, 2, 2)}),
        ({"scale_elements": 4, "value_head_dim": 12}, {"key_scale": (4, 2, 2), "value_scale": (4, 2, 3)}),
        ({"scale_elements": 2, "heads_first": True}, {"key_scale": (2, 4, 4), "value_scale": (2, 4, 4)}),
        (LATENT | {"scale_elements": 6}, {"latent_scale": (4, 1, 2)}),
    ],
)
def test_scales_lie_beside_what_they_scale(fields: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> None:
    """One for each token and head, or for each `scale_elements` of them, in their own dtype, after all the data."""
    layout = layout_of({"dtype": "int8", "scale_dtype": "float32"} | fields).for_rank(1, 4)
    data, scales = layout.parts[: len(shapes)], layout.parts[len(shapes) :]
    assert {part.name: part.shape for part in scales} == shapes
    assert [f"{part.name}_scale" for part in data] == list(shapes)
    assert {part.dtype for part in data} == {"int8"} and {part.dtype for part in scales} == {"float32"}
    assert all(part.num_bytes == 4 * np.prod(part.shape) for part in scales)


def test_int4_is_packed_along_the_last_dimension() -> None:
    """Two elements share a byte: shapes stay in elements, storage has half as many."""
    key, value = layout_of({"dtype": "int4", "value_head_dim": 6, "heads_first": True}).for_rank(1, 4).parts
    assert (key.shape, key.storage_shape, key.num_bytes) == ((2, 4, 8), (2, 4, 4), 32)
    assert (value.shape, value.storage_shape, value.num_bytes) == ((2, 4, 6), (2, 4, 3), 24)


@pytest.mark.parametrize(("heads_first", "stripes"), [(False, 1), (True, 2)])
def test_leading_tokens_are_at_the_front_of_each_stripe(heads_first: bool, stripes: int) -> None:
    """With the heads first every head has its own tokens; what has no token axis is whole."""
    key = layout_of({"heads_first": heads_first}).for_rank(1, 4).parts[0]
    assert key.num_stripes == stripes
    assert [key.leading_bytes(tokens) * stripes for tokens in (0, 1, 3, 4)] == [0, 32, 96, 128]
    assert KVPart("of the block", (5,), "int8", None).leading_bytes(1) == 5


def test_extra_layers_have_more_blocks() -> None:
    """The speculative head's arrays hold the ratio times the pool, rounded down, and count as memory."""
    layout = layout_of({"num_extra_layers": 2, "extra_layer_block_ratio": 1.5}).for_rank(1, 4)
    assert layout.num_layers == 5 and layout.block_bytes == 5 * layout.layer_bytes
    assert [layout.num_layer_blocks(layer, 7) for layer in range(5)] == [7, 7, 7, 10, 10]
    assert layout.gpu_bytes(7) == layout.layer_bytes * (3 * 7 + 2 * 10)
    assert [layout.num_gpu_blocks_in(layout.gpu_bytes(7) + more) for more in (-1, 0, 1)] == [6, 7, 7]
    assert layout.num_cpu_blocks_in(7 * layout.block_bytes) == 7


@given(
    layers=st.integers(1, 80),
    extra=st.integers(0, 5),
    ratio=st.one_of(st.just(1.0), st.floats(1, 1024)),
    head_dim=st.integers(1, 300),
    memory_bytes=st.one_of(st.integers(0, 10**7), st.integers(0, 2**47)),
)
def test_a_gpu_pool_is_the_largest_that_fits(
    layers: int, extra: int, ratio: float, head_dim: int, memory_bytes: int
) -> None:
    """The pool fits and one block more would not, whatever the extra layers' ratio rounds to."""
    ratio = ratio if extra else 1.0
    fields = {"num_layers": layers, "num_extra_layers": extra, "extra_layer_block_ratio": ratio, "head_dim": head_dim}
    layout = layout_of(fields).for_rank(1, 4)
    num_blocks = layout.num_gpu_blocks_in(memory_bytes)
    assert layout.gpu_bytes(num_blocks) <= memory_bytes < layout.gpu_bytes(num_blocks + 1)


@pytest.mark.parametrize("num_gpu_blocks", [1, 7])
@pytest.mark.parametrize("name", LAYOUTS)
def test_places_tile_the_memory(name: str, num_gpu_blocks: int) -> None:
    """In either order every byte of the KV memory is one piece's, and `check_places` takes what `places` gives."""
    layout = LAYOUTS[name]
    num_bytes, places = layout.gpu_bytes(num_gpu_blocks), layout.places(num_gpu_blocks)
    uses = np.zeros(num_bytes, np.int32)
    for part, place in ((p, place) for in_layer in places for p, place in zip(layout.parts, in_layer, strict=True)):
        for block in range(place.num_blocks):
            start = place.offset_bytes + block * place.stride_bytes
            uses[start : start + part.num_bytes] += 1
            assert start >= 0 and start + part.num_bytes <= num_bytes
    assert (uses == 1).all()
    assert [place.num_blocks for place, *_ in places] == [
        layout.num_layer_blocks(layer, num_gpu_blocks) for layer in range(layout.num_layers)
    ]
    layout.check_places(places, [num_bytes], num_gpu_blocks)
    with pytest.raises(LayoutError, match=rf"leaves its segment of \[{num_bytes - 1}\] bytes"):
        layout.check_places(places, [num_bytes - 1], num_gpu_blocks)


def test_block_first_keeps_a_block_together() -> None:
    """On the device a block is then what its image is: all its bytes side by side, blocks one after the other."""
    layout = LAYOUTS["block first"]
    assert [place.offset_bytes for in_layer in layout.places(7) for place in in_layer] == [
        layout.image_offset_bytes(layer, part) for layer in range(4) for part in range(2)
    ]
    assert {place.stride_bytes for in_layer in layout.places(7) for place in in_layer} == {layout.block_bytes}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"segment": 1}, "leaves its segment"),
        ({"segment": -1}, "leaves its segment"),
        ({"offset_bytes": -1}, "leaves its segment"),
        ({"offset_bytes": 4481}, "leaves its segment"),
        ({"num_blocks": 17}, "leaves its segment"),
        ({"stride_bytes": 127}, "leaves its segment"),
        ({"stride_bytes": -128}, "leaves its segment"),
        ({"num_blocks": 6}, "has 6 blocks; the GPU pool needs 7"),
        ({"num_blocks": 0}, "has 0 blocks; the GPU pool needs 7"),
    ],
)
def test_places_that_cannot_hold_the_pool_are_refused(change: dict[str, int], reason: str) -> None:
    """A piece outside its segment, pieces that overlap, too few blocks: the message has layer, part and numbers."""
    layout = LAYOUTS["layer first"]
    last = layout.places(7)[-1][-1]
    places: Places = (*layout.places(7)[:-1], (layout.places(7)[-1][0], last._replace(**change)))
    with pytest.raises(LayoutError, match=f"layer 2 value.*{reason}"):
        layout.check_places(places, [layout.gpu_bytes(7)], 7)


def test_places_of_another_number_of_layers_or_parts_are_refused() -> None:
    """The message has what came and what the layout has."""
    layout = LAYOUTS["layer first"]
    places = layout.places(7)
    for wrong in (places[:-1], (*places, places[0]), (*places[:-1], places[-1][:1]), ()):
        with pytest.raises(LayoutError, match=f"of {len(wrong)} layers; the layout has 3 of 2 parts"):
            layout.check_places(wrong, [layout.gpu_bytes(7)], 7)


def test_places_may_be_roomier_than_the_pool() -> None:
    """Gaps between blocks, more blocks than needed and several segments are all right."""
    layout = RankLayout(num_layers=2, parts=(KVPart("latent", (10,), "int8"),))
    layout.check_places(((Place(1, 3, 32, 9),), (Place(0, 0, 10, 7),)), [70, 3 + 8 * 32 + 10], 7)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_layers": 1.5}, r"layout\.num_layers is 1\.5; give a whole number"),
        ({"head_dim": True}, r"layout\.head_dim is True; give a whole number"),
        ({"value_head_dim": "8"}, r"layout\.value_head_dim is '8'; give a whole number"),
        ({"num_extra_layers": -1}, r"layout\.num_extra_layers is -1; it must be at least 0"),
        ({"scale_dtype": "float12"}, r"layout\.scale_dtype is 'float12'; known"),
        ({"dtype": None}, r"layout\.dtype is None; known"),
        ({"num_layers": MAX_LAYERS, "num_extra_layers": 1}, rf"{MAX_LAYERS} \+ 1 layers; at most {MAX_LAYERS}"),
        ({"value_head_dim": -1}, r"layout\.value_head_dim is -1; it must not be negative"),
        ({"value_head_dim": 0}, r"value_head_dim is 0 .* with 2 KV heads; .*use num_kv_heads = 1"),
        ({"dtype": "int4", "head_dim": 7}, "7 elements of int4 do not fill whole bytes"),
        ({"dtype": "int4", "value_head_dim": 5}, "5 elements of int4 do not fill whole bytes"),
        (SCALED | {"scale_dtype": "int4"}, r"layout\.scale_dtype is 'int4'"),
        ({"scale_elements": 4}, r"layout\.scale_elements is 4 without layout\.scale_dtype"),
        (SCALED | {"scale_elements": 0}, r"layout\.scale_elements is 0; it must divide 8"),
        (SCALED | {"scale_elements": 3}, r"layout\.scale_elements is 3; it must divide 8"),
        (SCALED | {"scale_elements": 8, "value_head_dim": 12}, r"layout\.scale_elements is 8; it must divide 12"),
        ({"device_order": "token_first"}, r"layout\.device_order is 'token_first'"),
        ({"extra_layer_block_ratio": 0.5}, r"layout\.extra_layer_block_ratio is 0\.5"),
        ({"extra_layer_block_ratio": float("nan")}, r"layout\.extra_layer_block_ratio is nan"),
        ({"num_extra_layers": 1, "extra_layer_block_ratio": 1025}, r"layout\.extra_layer_block_ratio is 1025"),
        (
            {"device_order": "block_first", "num_extra_layers": 1, "extra_layer_block_ratio": 1.5},
            r"layout\.extra_layer_block_ratio is 1\.5; .* 1 with block_first",
        ),
    ],
)
def test_impossible_combinations_are_refused(fields: dict[str, object], message: str) -> None:
    """Each is refused with the field, the value seen and what would do."""
    with pytest.raises(LayoutError, match=message):
        layout_of(fields)


def test_the_most_layers_are_taken() -> None:
    """The limit itself is allowed: a layer's number fits its word."""
    assert layout_of({"num_layers": MAX_LAYERS - 1, "num_extra_layers": 1}).for_rank(1, 4).num_layers == MAX_LAYERS
