"""Ranks, workers and storage processes die and hang, by seed, under engines of every habit: no wrong byte, no hang,
no block lost."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache import ranks as rank_access
from fastdeploy_cache.books.generations import Reason
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.config import WRITE_POLICIES
from tests.faults.test_storage_processes import file_storage
from tests.rigs.chaos_drivers import NativeDriver
from tests.rigs.chaos_faults import RankFaults, StorageFaults, Workers
from tests.rigs.chaos_rig import Story, WrongBytesError, moved
from tests.rigs.faulty_engine import new_config

NUM_GPU, NUM_CPU, TP_SIZE = 24, 48, 2
SEEDS = range(2)
PATIENT = {"max_restarts": 1000, "restart_backoff_seconds": 0.0, "task_timeout_seconds": 0.75}
IMPATIENT_STORE: dict[str, Any] = {"task_timeout_seconds": 0.5, "breaker_failures": 1000}  # never left alone


def chaos_config(seed: int, folder: Path | None = None, **transfer: Any) -> CacheConfig:
    """Small pools, short deadlines, ranks that are started again however often they die. `folder`: a store in it, below
    a CPU tier that holds less than the GPU's."""
    changes: dict[str, Any] = {"cpu_write_policy": WRITE_POLICIES[seed % 3], "recompute_last_token": seed % 2 == 1}
    if folder is not None:
        store = dataclasses.replace(file_storage(folder), **IMPATIENT_STORE)
        changes |= {"storage": store, "min_prefetch_tokens": 1, "num_cpu_blocks": 16}
    return dataclasses.replace(new_config(TP_SIZE, NUM_GPU, NUM_CPU, **{**PATIENT, **transfer}), **changes)


@pytest.fixture
def broken_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that flip a bit of the first block of each copy."""
    (tmp_path / "sitecustomize.py").write_text(_FLIP)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


_FLIP = """
from fastdeploy_cache.transfer_manager.device import cpu
copy = cpu._copy

def copy_wrongly(destinations, sources, spans):
    copy(destinations, sources, spans)
    destinations[spans[0][1].start, 0, 0] ^= 1

cpu._copy = copy_wrongly
"""


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("owner", ["engine", "worker", "transfer"])
def test_whoever_owns_the_kv_arrays(owner: str, seed: int) -> None:
    """The engine's arrays survive all, a worker's go with it, a rank's with each of its deaths; the CPU tier stays."""
    with contextlib.ExitStack() as cleanup:
        driver = NativeDriver(cleanup.enter_context(PrefixCacheManager(chaos_config(seed, kv_owner=owner))))
        faults = Workers(driver, cleanup) if owner == "worker" else RankFaults(driver)
        story = Story(driver, seed, faults.all())
        story.run()
        assert bool(story.seen["loss"]) == (owner != "engine")
        moved(driver.cache.stats().num_swapped_in_blocks)


@pytest.mark.parametrize(("seed", "owner"), [(0, "engine"), (1, "worker"), (3, "transfer")])
def test_whoever_owns_the_kv_arrays_above_a_store(owner: str, seed: int, tmp_path: Path) -> None:
    """Storage processes die and hang, too, below a CPU tier of a few blocks: what they lose is computed."""
    with contextlib.ExitStack() as cleanup:
        config = chaos_config(seed, tmp_path, kv_owner=owner)
        driver = NativeDriver(cleanup.enter_context(PrefixCacheManager(config)))
        faults = Workers(driver, cleanup) if owner == "worker" else RankFaults(driver)
        Story(driver, seed, {**faults.all(), **StorageFaults(driver.cache).all()}, num_steps=250).run()
        storage = driver.cache.stats().storage
        assert storage is not None
        moved(storage.num_fetched_blocks)
        moved(driver.cache.stats().num_swapped_in_blocks)


def test_a_story_finds_a_flipped_bit(broken_ranks: None) -> None:
    """The rig's own check: ranks that copy one byte wrongly do not get through a story."""
    with PrefixCacheManager(chaos_config(0)) as cache, pytest.raises(WrongBytesError, match="wrong bytes on rank"):
        Story(NativeDriver(cache), 0, {}).run()


def test_a_story_finds_blocks_of_arrays_that_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rig's own check: a cache that still finds what lay in a dead rank's arrays does not get through a story."""

    def forget_nothing(tree: PrefixTree) -> None:
        tree.generations.begin(Reason.GPU_LOST)

    monkeypatch.setattr(rank_access, "drop_gpu", forget_nothing)
    with PrefixCacheManager(chaos_config(0, kv_owner="transfer")) as cache, pytest.raises(WrongBytesError):
        driver = NativeDriver(cache)
        Story(driver, 0, RankFaults(driver).all()).run()
