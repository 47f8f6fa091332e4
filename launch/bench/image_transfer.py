"""How fast checkpoints move beside full blocks of as many bytes, and for how long one holds up what comes behind it."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.launch.bench.transfer import WAYS, Ranks
from fastdeploy_cache.transfer_manager.device.images import STEP_BYTES
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.task import TaskKind

_BLOCK_SIZE = 64
_SMALL_BYTES = 2**20
PROMISED = 0.9  # of the speed of full blocks


class ImageCase(NamedTuple):
    """A model's layers: so many full ones between those of another kind."""

    name: str
    layout: KVLayout


def _layers(num_layers: int, full: range) -> tuple[KVGroup, tuple[int, ...]]:
    return KVGroup(kind="full", layers=tuple(full)), tuple(sorted(set(range(num_layers)) - set(full)))


def _windows(name: str, num_layers: int, full: range, reach_tokens: int, head: tuple[int, int]) -> ImageCase:
    """`head`: how many there are, and the elements of each."""
    group, others = _layers(num_layers, full)
    groups = (group, KVGroup(kind="window", reach_tokens=reach_tokens, layers=others))
    layout = KVLayout(num_layers=num_layers, num_kv_heads=head[0], head_dim=head[1], dtype="bfloat16", groups=groups)
    return ImageCase(name, layout)


def _states(name: str, num_layers: int, full: range, *shapes: tuple[int, ...]) -> ImageCase:
    group, others = _layers(num_layers, full)
    parts = tuple(StatePart(name=str(n), shape=shape, dtype="bfloat16") for n, shape in enumerate(shapes))
    groups = (group, KVGroup(kind="state", layers=others, parts=parts))
    layout = KVLayout(num_layers=num_layers, num_kv_heads=2, head_dim=256, dtype="bfloat16", groups=groups)
    return ImageCase(name, layout)


IMAGE_CASES = (
    _windows("gpt-oss-20b: windows of 128", 24, range(1, 24, 2), 128, (8, 64)),
    _states("Qwen3-Next-80B: states", 48, range(3, 48, 4), (8192, 3), (32, 128, 128)),
    _windows("Gemma-3-27B: windows of 1,024", 62, range(5, 62, 6), 1024, (16, 128)),
)


class ImageSpeeds(NamedTuple):
    """Medians, in bytes per second; of full blocks as many as the image has pages."""

    num_bytes: int
    blocks_out: float
    blocks_in: float
    image_out: float
    image_in: float


class _Pool(NamedTuple):
    """A layout, and ids of the image and of as many full blocks; the others are other blocks'."""

    layout: RankLayout
    units: tuple[Sequence[int], ...]
    num_pages: int

    @classmethod
    def of(cls, case: ImageCase) -> _Pool:
        layout = case.layout.for_rank(1, _BLOCK_SIZE)
        counts = [row.num_checkpoint_units for row in layout.rows[1:]]
        sized = dataclasses.replace(layout, num_units=tuple(2 * count for count in counts))
        units = tuple(np.random.default_rng(1).permutation(2 * count)[:count].tolist() for count in counts)
        return cls(sized, units, layout.num_checkpoint_pages)

    @property
    def num_blocks(self) -> int:
        """Blocks of the GPU pool, and of the CPU pool."""
        return 2 * self.num_pages + 2


def fits(case: ImageCase, memory_bytes: int) -> bool:
    """Whether a pool of the case is in so many bytes."""
    pool = _Pool.of(case)
    return pool.num_blocks * pool.layout.block_bytes <= memory_bytes


def image_speeds(case: ImageCase, repeats: int) -> ImageSpeeds:
    """Scattered blocks and a scattered image out and in, in the same rounds, of which the first does not count."""
    pool = _Pool.of(case)
    scattered = np.random.default_rng(2).permutation(pool.num_blocks)
    blocks, pages = scattered[: pool.num_pages].tolist(), scattered[-pool.num_pages :].tolist()
    times: list[list[float]] = []
    with Ranks(1, pool.layout, pool.num_blocks, pool.num_blocks) as ranks:
        for _ in range(repeats + 1):
            row = [ranks.run(way, blocks, blocks[::-1]) for way in WAYS]
            times.append([*row, *(ranks.run(way, (), pages, pool.units) for way in WAYS)])
    seconds = [statistics.median(column) for column in zip(*times[1:], strict=True)]
    num_bytes = pool.layout.checkpoint_bytes
    in_blocks = pool.num_pages * pool.layout.block_bytes
    speeds = [size / each for size, each in zip((in_blocks, in_blocks, num_bytes, num_bytes), seconds, strict=True)]
    return ImageSpeeds(num_bytes, *speeds)


class Delay(NamedTuple):
    """Medians in seconds."""

    alone: float  # a small load
    behind: float  # the same, sent just after the image
    step: float  # one of the image's


def delay_behind_an_image(case: ImageCase, repeats: int) -> Delay:
    """How long a load of 1 MiB takes, or of a block that is larger, that comes just behind the load of an image."""
    pool = _Pool.of(case)
    num_small = max(1, _SMALL_BYTES // pool.layout.block_bytes)
    small = range(pool.num_pages, pool.num_pages + num_small)
    alone, behind, image = list[float](), list[float](), list[float]()
    with Ranks(1, pool.layout, pool.num_blocks, pool.num_blocks) as ranks:
        for _ in range(repeats + 1):
            alone.append(ranks.run(TaskKind.SWAP_IN, small, small))
            started = time.perf_counter()
            first = ranks.start_task(TaskKind.SWAP_IN, (), range(pool.num_pages), pool.units)
            second = ranks.start_task(TaskKind.SWAP_IN, small, small)
            ranks.wait(second)
            behind.append(time.perf_counter() - started)
            ranks.wait(first)
            image.append(time.perf_counter() - started)
    num_steps = -(-pool.layout.checkpoint_bytes // STEP_BYTES)
    medians = [statistics.median(each[1:]) for each in (alone, behind, image)]
    return Delay(medians[0], medians[1], medians[2] / num_steps)
