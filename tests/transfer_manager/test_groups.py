"""Groups of layers: which blocks of each a request reads, what they take, and what cannot be."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, Row, StatePart, rows_of
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.hybrid_models import GEMMA_3, GPT_OSS, NEMOTRON_H, QWEN3_NEXT, SMALL, read_tokens

FULL = KVGroup(kind="full", layers=(0,))
STATE = KVGroup(kind="state", layers=(1,), parts=(StatePart(name="ssm", shape=(4, 2), split_axis=0),))


def model(*groups: KVGroup, num_layers: int = 2, **fields: Any) -> KVLayout:
    return KVLayout(**{"num_layers": num_layers, "num_kv_heads": 2, "head_dim": 4, **fields}, groups=groups)


@given(st.sampled_from(["full", "window", "chunk", "state"]), st.integers(1, 40), st.integers(1, 9), st.integers(0, 30))
def test_first_block_is_that_of_the_first_token_that_is_read(kind: Any, reach: int, size: int, end: int) -> None:
    """Of the token behind a boundary, by the definition of the kind; none where nothing is read."""
    row = Row(kind, reach if kind in ("window", "chunk") else 0, size)
    tokens = read_tokens(kind, reach, end * size)
    assert row.first_block(end) == (min(tokens) // size if tokens else end)
    if kind != "full":
        assert end - row.first_block(end) <= row.num_checkpoint_units


@given(st.sampled_from(["window", "chunk"]), st.integers(1, 40), st.integers(1, 9))
def test_the_largest_checkpoint_is_reached(kind: Any, reach: int, size: int) -> None:
    """Some boundary needs as many units as the row says, and none needs more."""
    row = Row(kind, reach, size)
    assert max(end - row.first_block(end) for end in range(reach * size + 2)) == row.num_checkpoint_units


def test_rows_are_kinds_with_a_reach() -> None:
    """The full one first, then each in the order of its first group, once."""
    groups = [
        KVGroup(kind="window", reach_tokens=8, layers=(0,)),
        KVGroup(kind="full", layers=(1,)),
        KVGroup(kind="window", reach_tokens=16, layers=(2,)),
        KVGroup(kind="window", reach_tokens=8, layers=(3,)),
        STATE,
    ]
    assert list(map(str, rows_of(groups, 4))) == ["full", "window 8", "window 16", "state"]
    assert [row.num_request_units for row in rows_of(groups, 4)[1:]] == [4, 6, 2]


@pytest.mark.parametrize(
    ("layout", "mebibytes", "tokens", "pages"),
    [(GPT_OSS, 3.0, 128, 2), (GEMMA_3, 416.0, 5325, 84), (QWEN3_NEXT, 37.7, 1608, 26), (NEMOTRON_H, 97.4, 6234, 98)],
)
def test_checkpoints_of_real_models(layout: KVLayout, mebibytes: float, tokens: int, pages: int) -> None:
    """Bytes of a checkpoint at block size 64, the full KV that is as large, and the pages of the CPU tier."""
    rank = layout.for_rank(1, 64)
    assert round(rank.checkpoint_bytes / 2**20, 1) == mebibytes
    assert round(rank.checkpoint_bytes / (rank.block_bytes / 64)) == tokens
    assert rank.num_checkpoint_pages == pages


@pytest.mark.parametrize("tp_size", [1, 2])
def test_layers_know_their_parts_and_numbers(tp_size: int) -> None:
    """Each its own arrays, shared out to the ranks, and as many as its row has units."""
    rank = SMALL.for_rank(tp_size, 4)
    assert [str(row) for row in rank.rows] == ["full", "window 10", "state", "chunk 12"]
    assert [layer.row for layer in rank.layers] == [0, 1, 2, 3, 2, 0]
    heads = 2 // tp_size
    assert [part.shape for part in rank.parts_of(0)] == [(4, heads, 4)] * 2
    assert [(part.shape, part.dtype) for part in rank.parts_of(3)] == [((4, 2 * heads, 4), "float32")] * 2
    (state,) = rank.parts_of(2)
    assert (state.name, state.shape, state.dtype, state.token_axis) == ("state", (heads, 3), "float32", None)
    rank = dataclasses.replace(rank, num_units=(7, 5, 3))
    assert [rank.num_layer_blocks(layer, 10) for layer in range(6)] == [10, 7, 5, 3, 5, 10]
    sizes = [sum(part.num_bytes for part in rank.parts_of(layer)) for layer in range(6)]
    assert rank.block_bytes == sizes[0] + sizes[5] and rank.unit_bytes(2) == sizes[2] + sizes[4]
    numbers = (10, 7, 5, 3, 5, 10)
    assert rank.gpu_bytes(10) == sum(n * size for n, size in zip(numbers, sizes, strict=True))
    assert rank.checkpoint_bytes == 3 * sizes[1] + sizes[2] + sizes[4] + 2 * sizes[3]


def test_extra_layers_keep_everything() -> None:
    """Those of a speculative head lie behind the model's, in the full row, with their own number of blocks."""
    rank = dataclasses.replace(SMALL, num_extra_layers=1, extra_layer_block_ratio=1.5).for_rank(1, 4)
    assert rank.layers[6].row == 0 and rank.num_layer_blocks(6, 10) == 15
    assert rank.block_bytes == SMALL.for_rank(1, 4).block_bytes * 3 // 2


def test_without_groups_all_is_as_before() -> None:
    """One kind of layers has no rows and nothing that a checkpoint would take."""
    rank = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4).for_rank(1, 4)
    assert rank.rows == rank.layers == () and rank.checkpoint_bytes == rank.num_checkpoint_pages == 0
    assert rank.parts_of(1) is rank.parts


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([FULL, KVGroup(kind="window", reach_tokens=8, layers=(0, 1))],
         "layout.groups[1].layers has layer 0, which layout.groups[0].layers has already"),
        ([KVGroup(kind="full", layers=(1, 1))],
         "layout.groups[0].layers has layer 1, which layout.groups[0].layers has already"),
        ([FULL], "layout.groups leave out layer 1 of 2; give each layer to one group"),
        ([FULL, KVGroup(kind="window", reach_tokens=8, layers=(2,))],
         "layout.groups[1].layers has 2; the layers are 0 to 1"),
        ([FULL, KVGroup(kind="window", reach_tokens=8, layers=(1.0,))],  # type: ignore[arg-type]
         "layout.groups[1].layers has 1.0; the layers are 0 to 1"),
        ([KVGroup(kind="full", layers=())], "layout.groups[0].layers is (); give the numbers"),
        ([dataclasses.replace(STATE, layers=(0, 1))],
         "layout.groups has kinds state, and none is 'full'; declare a model of windows alone as full"),
        ([FULL, KVGroup(kind="window", layers=(1,))], "layout.groups[1].reach_tokens is 0; give the window's tokens"),
        ([FULL, KVGroup(kind="chunk", reach_tokens=-1, layers=(1,))],
         "layout.groups[1].reach_tokens is -1; give the chunk's tokens"),
        ([KVGroup(kind="full", reach_tokens=8, layers=(0, 1))],
         "layout.groups[0].reach_tokens is 8 with kind 'full'; leave it out"),
        ([FULL, KVGroup(kind="windows", layers=(1,))],  # type: ignore[arg-type]
         "layout.groups[1].kind is 'windows'; use one of full, window, chunk, state"),
        ([FULL, KVGroup(kind="state", layers=(1,))], "layout.groups[1].parts is missing"),
        ([KVGroup(kind="full", layers=(0, 1), parts=STATE.parts)],
         "layout.groups[0].parts is given with kind 'full'; only a state has parts"),
        ([FULL, dataclasses.replace(STATE, head_dim=8)], "layout.groups[1].head_dim is given with kind 'state'"),
        ([FULL, dataclasses.replace(STATE, parts=STATE.parts * 2)], "layout.groups[1].parts are called ssm, ssm"),
        ([FULL, dataclasses.replace(STATE, parts=(StatePart(name="ssm", shape=(4,), dtype="float17"),))],
         "layout.groups[1].parts[0].dtype is 'float17'; use one of float32, float16, bfloat16"),
        ([FULL, dataclasses.replace(STATE, parts=(StatePart(name="ssm", shape=(4, 0)),))],
         "layout.groups[1].parts[0].shape is [4, 0]; give sizes of 1 or more"),
        ([FULL, dataclasses.replace(STATE, parts=(StatePart(name="ssm", shape=(4,), split_axis=1),))],
         "layout.groups[1].parts[0].split_axis is 1; shape [4] has no such dimension"),
        ([FULL, KVGroup(kind="window", reach_tokens=8, layers=(1,), dtype="float17")],
         "layout.groups[1].dtype is 'float17'; known: float32"),
        ([FULL, KVGroup(kind="window", reach_tokens=8, layers=(1,), num_kv_heads=0)],
         "layout.groups[1].num_kv_heads is 0; it must be at least 1"),
        (["full"], "layout.groups is ('full',); give a tuple of KVGroup"),  # type: ignore[list-item]
        ([KVGroup(kind="full", layers=1)], "layout.groups[0].layers is 1; give the numbers"),  # type: ignore[arg-type]
        ([KVGroup(kind="full", layers=(0, 1), parts=3)],  # type: ignore[arg-type]
         "layout.groups[0].parts is 3; give a tuple of StatePart"),
        ([FULL, dataclasses.replace(STATE, parts=(StatePart(name="s", shape=4),))],  # type: ignore[arg-type]
         "layout.groups[1].parts[0].shape is 4; give sizes of 1 or more"),
        ([FULL, KVGroup(kind="window", reach_tokens=2**70, layers=(1,))],
         "layout.groups[1].reach_tokens is 1180591620717411303424; give the window's tokens, 1 or more, below 2**31"),
        ([FULL, KVGroup(kind="window", reach_tokens=8, layers=(1,), dtype="int4", head_dim=47)],
         "layout.groups[1]: 47 elements of int4 do not fill whole bytes"),
    ],
)  # fmt: skip
def test_what_no_groups_can_be(groups: list[KVGroup], words: str) -> None:
    """One error each, with the field, its value, and what to give."""
    with pytest.raises(LayoutError, match=re.escape(words)):
        model(*groups)


def test_block_first_is_for_layers_that_are_alike() -> None:
    """With rows, not all of a block can lie side by side."""
    with pytest.raises(LayoutError, match=r"device_order is 'block_first' with layout\.groups; use 'layer_first'"):
        model(FULL, STATE, device_order="block_first")


def test_a_state_that_ranks_cannot_share() -> None:
    """The dimension that is cut has to divide; a rank has the whole of what is not cut."""
    whole = dataclasses.replace(STATE, parts=(StatePart(name="ssm", shape=(5, 2)),))
    assert model(FULL, whole).for_rank(2, 4).parts_of(1)[0].shape == (5, 2)
    cut = dataclasses.replace(STATE, parts=(StatePart(name="ssm", shape=(5, 2), split_axis=0),))
    with pytest.raises(LayoutError, match=r"groups\[1\]\.parts\[0\]\.shape is \[5, 2\] with split_axis 0.*2 ranks"):
        model(FULL, cut).for_rank(2, 4)
