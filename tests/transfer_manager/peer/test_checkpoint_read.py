"""The units of a checkpoint are read row by row, a few layers at a time, each once, and into nothing else."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.peer.checkpoint_read import CheckpointRead, why_no_units
from fastdeploy_cache.transfer_manager.peer.heads import PieceMaker, Side

BLOCK, NUM_BLOCKS, NUM_UNITS = 4, 9, 11
PARTS = (StatePart(name="conv", shape=(3, 2), dtype="float16"), StatePart(name="ssm", shape=(4,)))
LAYOUT = KVLayout(
    num_layers=6,
    num_kv_heads=2,
    head_dim=4,
    groups=(
        KVGroup(kind="window", reach_tokens=9, layers=(0, 4)),
        KVGroup(kind="full", layers=(1, 3)),
        KVGroup(kind="state", layers=(2,), parts=PARTS),
        KVGroup(kind="window", reach_tokens=9, layers=(5,), num_kv_heads=1, head_dim=6),
    ),
)
CHUNKS = replace(LAYOUT, groups=(replace(LAYOUT.groups[0], kind="chunk", reach_tokens=8), *LAYOUT.groups[1:]))


def rank_layout(layout: KVLayout = LAYOUT) -> RankLayout:
    made = layout.for_rank(1, BLOCK)
    return replace(made, num_units=(NUM_UNITS,) * (len(made.rows) - 1))


def ids_for(layout: RankLayout, boundary: int, random: np.random.Generator) -> list[np.ndarray[Any, Any]]:
    """Units by row, none twice."""
    return [random.permutation(NUM_UNITS)[: row.num_units_at(boundary)].astype(np.int32) for row in layout.rows[1:]]


def packed(units: list[np.ndarray[Any, Any]]) -> bytes:
    return b"".join(each.tobytes() for each in units)


@given(st.integers(1, NUM_BLOCKS), st.integers(1, 700), st.integers(0, 2**32), st.sampled_from([LAYOUT, CHUNKS]))
def test_all_units_come_and_nothing_else_is_touched(boundary: int, most: int, seed: int, model: KVLayout) -> None:
    """Whatever is read at a time; layers of one row have other parts, and rows have other ids."""
    layout, random = rank_layout(model), np.random.default_rng(seed)
    places = layout.places(NUM_BLOCKS)
    there = random.integers(0, 256, layout.gpu_bytes(NUM_BLOCKS)).astype(np.uint8)
    here, expected = np.zeros_like(there), np.zeros_like(there)
    mine, theirs = ids_for(layout, boundary, random), ids_for(layout, boundary, random)
    side = Side(layout, places, 0)
    makers = [PieceMaker(side, side, 2, row=row) for row in range(len(layout.rows))]
    reading = CheckpointRead(layout, boundary, packed(mine))
    assert reading.next_step(most) is None and not reading.is_done, "the owner has named none yet"
    assert reading.note(packed(theirs)) and reading.note(packed(theirs))
    while (step := reading.next_step(most)) is not None:
        pieces = makers[step.row].pieces(step.mine, step.theirs, step.first_layer, step.end_layer)
        num_layers = sum(layout.row_of(layer) == step.row for layer in range(step.first_layer, step.end_layer))
        assert pieces.num_bytes.sum() <= most or num_layers == 1
        for _, local, _, remote, size in zip(*(column.tolist() for column in pieces), strict=True):
            assert not here[local : local + size].any(), "read twice"
            here[local : local + size] = there[remote : remote + size]
        reading.note_read(step)
    assert reading.is_done
    sources, wanted = layout.kv_views([there], places), layout.kv_views([expected], places)
    for layer in range(layout.num_layers):
        if row := layout.row_of(layer):
            for name, view in wanted[layer].items():
                view[mine[row - 1]] = sources[layer][name][theirs[row - 1]]
    assert np.array_equal(here, expected)


def test_a_boundary_of_chunks_has_nothing_to_read() -> None:
    """It is done once its owner has said that it is there: not before."""
    groups = (replace(CHUNKS.groups[0], layers=(0,)), replace(CHUNKS.groups[1], layers=(1,)))
    layout = rank_layout(replace(CHUNKS, num_layers=2, groups=groups))
    reading = CheckpointRead(layout, 2, b"")
    assert not reading.is_done
    assert reading.note(b"") and reading.is_done and reading.next_step(1) is None


@pytest.mark.parametrize("units", [b"", bytes(3), bytes(4 * 40)])
def test_units_of_another_boundary_are_none(units: bytes) -> None:
    """A cut message, and an owner with other rows."""
    layout = rank_layout()
    reading = CheckpointRead(layout, 5, packed(ids_for(layout, 5, np.random.default_rng(1))))
    assert not reading.note(units) and not reading.is_done and reading.next_step(100) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: ids[:-1], "8 bytes of units for a checkpoint of 3"),
        (lambda ids: [NUM_UNITS, *ids[1:]], "unit 11 of the row 'window 9' is outside a pool of 11"),
        (lambda ids: [*ids[:-1], -1], "outside a pool of 11"),
        (lambda ids: ids, None),
    ],
)
def test_a_task_with_other_units_is_refused(change: Any, words: str | None) -> None:
    """Too few, or outside their pool: they would be written over something else."""
    layout = rank_layout(CHUNKS if words is None else LAYOUT)
    boundary = 5
    ids = np.concatenate(ids_for(layout, boundary, np.random.default_rng(2))).tolist()
    found = why_no_units(layout, boundary, np.array(change(ids), np.int32).tobytes())
    assert (found is None) if words is None else words in str(found), found


def test_a_uniform_model_has_none() -> None:
    """Also none of zero units."""
    uniform = KVLayout(num_layers=1, num_kv_heads=1, head_dim=2).for_rank(1, BLOCK)
    assert why_no_units(uniform, 3, b"") is not None
