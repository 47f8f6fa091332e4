"""Sizes and places of a block's bytes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from transfer_manager.errors import LayoutError
from transfer_manager.layout import STORAGE_DTYPES, KVLayout, KVPart, RankLayout

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3": 1, "float8_e5m2": 1, "int8": 1}
ITEM_BYTES |= {"uint8": 1, "int4": 0.5}
UNEVEN = RankLayout(
    num_layers=3,
    parts=(KVPart("key", (4, 2, 8), "float16"), KVPart("scale", (4,), "float32"), KVPart("v", (5,), "int8")),
)


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
