"""Ranks die and hang, by seed, under engines that call each adapter as its own engine does: no wrong byte, no hang, no
block lost."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.adapters.fastdeploy import manager as fastdeploy
from fastdeploy_cache.adapters.mini_sglang import radix_cache as mini_sglang
from fastdeploy_cache.adapters.sglang import radix_cache as sglang
from fastdeploy_cache.config.cache import WRITE_POLICIES
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.chaos_block_tables import BlockPool, FastDeployV0, FastDeployV1
from tests.rigs.chaos_config import IMPATIENT_STORE, NUM_CPU, NUM_GPU, PATIENT, SEEDS, TP_SIZE, chaos_config
from tests.rigs.chaos_faults import RankFaults, StorageFaults
from tests.rigs.chaos_rig import SECONDS, Driver, Story, moved
from tests.rigs.chaos_token_slots import ContiguousSlots, MiniSGLang, SGLang
from tests.rigs.chaos_vllm_connector import VLLMConnector
from tests.rigs.fastdeploy_engine import SUFFIX, launch
from tests.rigs.fastdeploy_engine import new_config as fastdeploy_config
from tests.rigs.faulty_engine import BLOCK_SIZE

pytestmark = pytest.mark.processes

NUM_STEPS = 200
HOW_PATIENT = [SECONDS, 0.02]  # by seed: for loads, of engines that say so once. The second may come away empty


def new_story(driver: Driver, seed: int) -> Story:
    """Shorter than the manager's own: it is the calls that are new. Where there is a store, its processes die, too."""
    faults = RankFaults(driver).all()
    if driver.cache.config.storage is not None:
        faults |= StorageFaults(driver.cache).all()
    return Story(driver, seed, faults, num_steps=NUM_STEPS)


@pytest.mark.parametrize(("seed", "owner"), [(0, "engine"), (1, "transfer")])
@pytest.mark.parametrize("order", ["v0", "v1"])
def test_fastdeploy(order: str, owner: str, seed: int) -> None:
    """Both sequences, v1 also ahead of computing, over the engine's arrays and over ones that go with ranks."""
    config = fastdeploy_config(
        NUM_GPU, NUM_CPU, cpu_write_policy=WRITE_POLICIES[seed], transfer={"kv_owner": owner, **PATIENT}
    )
    ahead = order == "v1" and seed == 1
    made = fastdeploy.PrefixCacheManager(config, TP_SIZE, load_timeout_seconds=HOW_PATIENT[seed], schedules_ahead=ahead)
    with contextlib.closing(made):
        launch(made, SUFFIX, TP_SIZE)
        driver = FastDeployV1(made, schedules_ahead=ahead) if order == "v1" else FastDeployV0(made)
        story = new_story(driver, seed)
        story.run()
        assert bool(story.seen["loss"]) == (owner == "transfer")
        moved(seed or driver.cache.stats().num_swapped_in_blocks)


def test_fastdeploy_above_a_store(tmp_path: Path) -> None:
    """Finished tasks are written to a store, whose processes die and hang, below a CPU tier of a few blocks."""
    store = dataclasses.asdict(chaos_config(0, tmp_path).storage)
    given = {name: store[name] for name in ("folder", "weights_id", "admission", "capacity_bytes", "slab_bytes")}
    config = fastdeploy_config(NUM_GPU, 16, storage={**given, **IMPATIENT_STORE}, transfer=PATIENT)
    with contextlib.closing(fastdeploy.PrefixCacheManager(config, TP_SIZE)) as made:
        launch(made, SUFFIX, TP_SIZE)
        driver = FastDeployV1(made, schedules_ahead=False)
        new_story(driver, 0).run()
        storage = driver.cache.stats().storage
        assert storage is not None
        moved(storage.num_fetched_blocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_vllms_block_pool(seed: int) -> None:
    """What is computed is published by the next step, or, where steps are scheduled ahead, as each ends."""
    with PrefixCacheManager(chaos_config(seed)) as cache:
        driver = BlockPool(cache, schedules_ahead=seed == 1, load_timeout_seconds=HOW_PATIENT[seed])
        new_story(driver, seed).run()
        moved(seed or cache.stats().num_swapped_in_blocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_vllms_connector(seed: int) -> None:
    """Its halves load between steps, or layer by layer inside of one, below blocks and prefixes of vLLM's own."""
    rows = KVLayout(num_layers=3, num_kv_heads=1, head_dim=16, dtype="float16", value_head_dim=0)
    config = dataclasses.replace(chaos_config(seed, kv_owner="worker"), layout=rows)
    with contextlib.closing(VLLMConnector(config, is_layerwise=seed == 1)) as driver:
        new_story(driver, seed).run()
        moved(driver.num_loaded)


def settings_of(config: CacheConfig, *names: str) -> dict[str, Any]:
    """Of a configuration, what an adapter does not say itself."""
    return {name: getattr(config, name) for name in (*names, "load_policy", "layout", "transfer", "transfer_client")}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_sglang(seed: int, tmp_path: Path) -> None:
    """Loads back are waited for, or followed layer by layer; the last has a store below a CPU tier of few pages."""
    given = chaos_config(seed, tmp_path if seed == 2 else None)
    config = sglang.new_config(
        NUM_GPU * BLOCK_SIZE,
        BLOCK_SIZE,
        hicache_ratio=0.67 if seed == 2 else 2.0,
        hicache_write_policy=WRITE_POLICIES[seed % 2],
        prefetch_threshold=1,
        **settings_of(given, "storage"),
    )
    with sglang.new_manager(config) as cache:
        driver = SGLang(cache, overlap_loads=seed == 1)
        new_story(driver, seed).run()
        stats = cache.stats()
        assert seed == 1 or not driver.num_overlapped
        moved(stats.num_swapped_in_blocks)
        moved(stats.storage is None or stats.storage.num_fetched_blocks)


@pytest.mark.parametrize("seed", SEEDS)
def test_mini_sglang(seed: int) -> None:
    """Pages are read while ranks that copy them down die and hang."""
    given = settings_of(chaos_config(seed), "num_cpu_blocks", "cpu_write_policy")
    with mini_sglang.new_manager(NUM_GPU, BLOCK_SIZE, **given) as cache:
        driver = MiniSGLang(cache)
        story = new_story(driver, seed)
        story.run()
        story.go_on(lambda: cache.stats().num_swapped_out_blocks)
        assert story.seen["reused"] and cache.stats().num_swapped_out_blocks


@pytest.mark.parametrize("seed", SEEDS)
def test_contiguous_slots(seed: int) -> None:
    """Copies from slot to slot fail, or come late: then nothing of them counts."""
    with PrefixCacheManager(dataclasses.replace(chaos_config(seed), num_gpu_blocks=6 * 12)) as cache:
        driver = ContiguousSlots(cache, 6)
        new_story(driver, seed).run()
        assert driver.num_copied
