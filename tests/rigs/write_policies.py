"""What the tests of write policies look at: what has a copy, what is cold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

from fastdeploy_cache.books.run import Run
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel

A, B, C, D = ([base + i for i in range(400)] for base in (1000, 2000, 3000, 4000))
Block = tuple[int, ...]  # the first tokens of the runs down to it, and its place in the last one


def blocks_of(run: Run, start: int, end: int) -> set[Block]:
    names = [int.from_bytes(upper.tokens[:4], "little") for upper in run.path()]
    return {(*names, block) for block in range(start, end)}


def copied(model: CacheModel) -> set[Block]:
    """The blocks that have a copy in the CPU tier."""
    return {b for run in model.cache._books.tree.runs() for b in blocks_of(run, run.cpu_start, run.cpu_end)}


def in_cold_zone(model: CacheModel) -> set[Block]:
    """The blocks on the GPU of the runs that write_back copies from now."""
    copy_down = model.cache._movement.copy_down
    num_blocks = copy_down._num_reserve - model.cache.stats().gpu.num_free
    zone, _ = copy_down._cold_zone(num_blocks) if num_blocks > 0 else (set(), [])
    return {b for run in zone for b in blocks_of(run, 0, run.num_gpu)}


def look_ahead(model: CacheModel) -> None:
    """What every few moved blocks lead to."""
    with model.cache._books:
        model.cache._movement.copy_down.look_ahead()


@contextmanager
def no_copies(model: CacheModel) -> Iterator[None]:
    """The ranks' queue is full meanwhile: what is released has no copy afterwards."""
    limits = model.client.max_tasks
    limits[TaskKind.SWAP_OUT], before = 0, limits[TaskKind.SWAP_OUT]
    yield
    limits[TaskKind.SWAP_OUT] = before


def write_back(policy: str = "lru", num_gpu: int = 40, num_cpu: int = 100, **settings: object) -> CacheModel:
    """Block size 1; a quarter of the GPU pool is to be free or copied."""
    model = CacheModel(1, num_gpu, num_cpu, policy=policy, write_policy="write_back", clock=lambda: 0.0, **settings)
    assert model.cache.config.cpu_write_high_water == settings.get("cpu_write_high_water", 0.75)
    return model


def traffic(model: CacheModel, choose: random.Random, num_requests: int) -> None:
    """Prompts that share beginnings, half of them repeated; some copies land late."""
    for _ in range(num_requests):
        text = choose.choice((A, B, C, D))
        tokens = text[: choose.randint(1, 16)] + [choose.randint(0, 2) for _ in range(choose.choice((0, 0, 2, 5)))]
        model.serve(tokens, stays=False, patient=choose.random() < 0.5)
        model.land(None, choose.randint(0, 2))
