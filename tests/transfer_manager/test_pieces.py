"""Pieces of many blocks: whichever way they are copied, exactly these bytes arrive, and none besides."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

from fastdeploy_cache.transfer_manager.device.pieces import Bytes, Pairs, Route, copy_pieces

NUM_BLOCKS = 40


def route(source_ids: list[int], destination_ids: list[int]) -> Route:
    """Of these ids."""
    return Route(np.array(source_ids, np.int32), np.array(destination_ids, np.int32))


ROUTES = {
    "neighbours": route(list(range(3, 33)), list(range(10, 40))),
    "neighbours in two runs": route([*range(3, 13), *range(20, 30)], list(range(20))),
    "scattered": route([7, 2, 39, 0, 11, 5, 30], [16, 0, 3, 8, 1, 39, 22]),
    "backwards": route([5, 4, 3, 2], [2, 3, 4, 5]),
    "one": route([39], [0]),
    "none": route([], []),
}
# rows, bytes of a row, bytes between a block's rows: small and large blocks, in one piece and in many
SHAPES = [
    (1, 0, 8),
    (1, 1, 1),
    (1, 64, 64),
    (3, 7, 500),
    (2, 2048, 5000),
    (1, 4096, 4096),
    (1, 4096, 9000),
    (4, 3000, 200_000),
]


def memory(rows: int, row_bytes: int, row_stride: int, seed: int) -> tuple[Bytes, Bytes]:
    """Noise, and its pieces [blocks, rows, row bytes], or [blocks, bytes]: a row of all blocks where there is room."""
    block_stride = row_bytes if row_stride >= NUM_BLOCKS * row_bytes else rows * row_stride
    num_bytes = (NUM_BLOCKS - 1) * block_stride + (rows - 1) * row_stride + row_bytes
    flat = np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)
    pieces = as_strided(flat, (NUM_BLOCKS, rows, row_bytes), (block_stride, row_stride, 1))
    return flat, pieces if rows > 1 else pieces[:, 0]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("to_device", [False, True])
def test_these_bytes_arrive_and_no_others(shape: tuple[int, int, int], name: str, to_device: bool) -> None:
    """Between strided memory and images, either way: as a plain loop over blocks does it."""
    rows, row_bytes, row_stride = shape
    device = memory(rows, row_bytes, row_stride, seed=1)
    image = memory(rows, row_bytes, row_bytes, seed=2)
    (target_flat, target), (source_flat, source) = (device, image) if to_device else (image, device)
    before, expected = source_flat.copy(), target_flat.copy()
    wanted = as_strided(expected, target.shape, target.strides)
    for origin, goal in ROUTES[name].blocks:
        wanted[goal] = source[origin]
    copy_pieces(Pairs(target, source), ROUTES[name])
    assert np.array_equal(target_flat, expected) and np.array_equal(source_flat, before)


@pytest.mark.parametrize("name", ROUTES)
def test_spans_are_the_same_blocks_with_neighbours_joined(name: str) -> None:
    """In their order, and as few as there are breaks."""
    found = ROUTES[name]
    pairs = [
        (source, goal)
        for sources, goals in found.spans
        for source, goal in zip(range(sources.start, sources.stop), range(goals.start, goals.stop), strict=True)
    ]
    assert pairs == found.blocks
    breaks = sum(b != (a[0] + 1, a[1] + 1) for a, b in itertools.pairwise(pairs))
    assert len(found.spans) == breaks + bool(pairs)


@pytest.mark.parametrize("num_parts", [1, 2, 3, 30])
def test_parts_are_the_whole(num_parts: int) -> None:
    """One behind the other, about equally many."""
    parts = ROUTES["neighbours"].parts(num_parts)
    assert [pair for part in parts for pair in part.blocks] == ROUTES["neighbours"].blocks
    assert len(parts) == num_parts and len({len(part.blocks) for part in parts}) <= 2


def test_a_pool_without_blocks_has_nothing_to_copy() -> None:
    """No CPU tier, and a task without blocks, as a rank is asked for a sign of life."""
    none = np.empty((0, 3, 7), np.uint8)
    copy_pieces(Pairs(none, memory(3, 7, 500, seed=1)[1]), ROUTES["none"])
