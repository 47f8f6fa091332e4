"""What FastDeploy's schedulers ask in each role, with and without prefix caching: they come up, go on and get rid."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fastdeploy_cache.adapters.fastdeploy.config import pool_size
from fastdeploy_cache.adapters.fastdeploy.manager import NotEnoughBlocksError, PrefixCacheManager
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    SUFFIX,
    Kernel,
    Task,
    give_up_v1,
    launch,
    new_config,
    push_out,
    serve_v0,
)

SWITCH = "ENABLE_V1_KVCACHE_SCHEDULER"
NUM_SPARE = 2  # blocks that the schedulers of split roles take for decoding, beside those of the prompt


@pytest.mark.parametrize(("value", "size"), [(None, 100), ("1", 100), ("0", 75)])
def test_the_pool_of_each_scheduler(monkeypatch: pytest.MonkeyPatch, value: str | None, size: int) -> None:
    """ENABLE_V1_KVCACHE_SCHEDULER=0 leaves the manager the prefill share, also after profiling; else it has all."""
    monkeypatch.delenv(SWITCH, raising=False)
    if value is not None:
        monkeypatch.setenv(SWITCH, value)
    config = new_config(100)
    config.cache_config.prefill_kvcache_block_num = 75
    manager = PrefixCacheManager(config, 1)
    assert manager.num_gpu_blocks == len(manager.gpu_free_block_list) == size
    config.cache_config.total_block_num, config.cache_config.prefill_kvcache_block_num = 200, 150
    manager.update_cache_config(config.cache_config)
    assert manager.num_gpu_blocks == 2 * size
    manager.close()


def test_a_scheduler_that_the_platform_switches_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastDeploy writes 0 into its module and not into the environment; what is no number is refused."""
    module: Any = ModuleType("fastdeploy.envs")
    monkeypatch.setitem(sys.modules, "fastdeploy.envs", module)
    monkeypatch.setenv(SWITCH, "1")
    cache = new_config(100).cache_config
    cache.prefill_kvcache_block_num = 75
    assert pool_size(cache) == 100
    module.ENABLE_V1_KVCACHE_SCHEDULER = 0
    assert pool_size(cache) == 75
    del cache.prefill_kvcache_block_num
    assert pool_size(cache) == 100, "the only one there is"
    del module.ENABLE_V1_KVCACHE_SCHEDULER
    monkeypatch.setenv(SWITCH, "yes")
    with pytest.raises(ConfigError, match="SCHEDULER is 'yes'"):
        pool_size(cache)


@pytest.mark.processes
def test_workers_of_the_v0_scheduler_bring_arrays_for_all_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """They use blocks behind the pool: arrays that end with it are refused, larger ones are attached and served."""
    monkeypatch.setenv(SWITCH, "0")
    config = new_config(16, 8)
    config.cache_config.prefill_kvcache_block_num = 12
    manager = PrefixCacheManager(config, 1)
    with pytest.raises(ConfigError, match=r"use 16 blocks.* 12 of .*'kv_owner': 'worker'"):
        launch(manager, SUFFIX)
    config.cache_config.fastdeploy_cache["transfer"] = {"kv_owner": "worker"}
    launch(manager, SUFFIX)
    layout = manager.cache.config.rank_layout()
    assert layout is not None
    with closing(KVMemory.create(layout, 16)) as arrays:
        manager.cache.ranks.attach_kv(0, arrays.handle())
        kernel = Kernel(manager)
        assert [serve_v0(manager, Task(name, PROMPT), [1, 2], kernel)[0] for name in "ab"] == [0, 20]
        push_out(manager)
        assert serve_v0(manager, Task("c", PROMPT), [1, 2], kernel)[0] == 20
        manager.close()


def test_a_negative_number_of_blocks_is_none(manager: PrefixCacheManager) -> None:
    """As in the original, awake or asleep; a positive one is refused where there is no room, as before."""
    assert manager.can_allocate_gpu_blocks(-3)
    for number in (-3, 0):
        assert manager.allocate_gpu_blocks(number, "a") == []
    manager.control("sleep")
    assert manager.allocate_gpu_blocks(-1) == []
    with pytest.raises(NotEnoughBlocksError):
        manager.allocate_gpu_blocks(1)
    manager.control("wakeup")
    assert len(manager.gpu_free_block_list) == 32


class Instance:
    """One instance under the v1 scheduler: blocks for the whole prompt, of a split deployment also some to decode, are
    taken before anything is computed; each step then asks for what it needs less what the task has."""

    def __init__(self, role: str, *, caching: bool = True) -> None:
        self.role, self.caching = role, caching
        self.manager = PrefixCacheManager(new_config(24, caching=caching), 1, role)

    @property
    def _matches(self) -> bool:
        return self.caching and self.role != "decode"

    def take(self, task: Task) -> int:
        """Before the first step; the matched tokens."""
        manager, num_tokens, num_matched = self.manager, len(task.prompt_token_ids), 0
        num_blocks = manager.get_required_block_num(num_tokens, 4) + (NUM_SPARE if self.role != "mixed" else 0)
        if self._matches:
            task.block_tables, num_matched, _ = manager.request_match_blocks(task, 4)
        assert manager.can_allocate_gpu_blocks(num_blocks - len(task.block_tables)), "starved"
        task.block_tables += manager.allocate_gpu_blocks(num_blocks - len(task.block_tables), task.request_id)
        if self._matches:
            manager.update_cache_blocks(task, 4, num_tokens)
        return num_matched

    def step(self, task: Task, num_tokens: int) -> int:
        """Ask for the blocks of a step up to that token; the number that was asked for."""
        missing = self.manager.get_required_block_num(num_tokens, 4) - len(task.block_tables)
        assert self.manager.can_allocate_gpu_blocks(missing)
        task.block_tables += self.manager.allocate_gpu_blocks(missing, task.request_id)
        return missing

    def finish(self, task: Task) -> None:
        """As the scheduler does: write, then free; an error in between would cost the blocks."""
        if self.role == "decode":
            self.manager.write_cache_to_storage_decode(task)
        else:
            self.manager.write_cache_to_storage(task)
        if self._matches:
            give_up_v1(self.manager, task)
        else:
            self.manager.recycle_gpu_blocks(task.block_tables, task.request_id)
            task.block_tables = []


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("role", ["prefill", "decode", "mixed"])
def test_every_role_serves_more_than_its_pool_holds(role: str, caching: bool) -> None:
    """Thirty tasks of a pool for three: steps ask for negative numbers, and no block is lost."""
    instance, num_hits, least = Instance(role, caching=caching), 0, 0
    for number in range(30):
        prompt = [number % 3, *PROMPT]
        task = Task(str(number), prompt)
        num_hits += instance.take(task) > 0
        for end in (9, len(prompt), len(prompt) + 1):
            least = min(least, instance.step(task, end))
        task.output_token_ids.append(1)
        instance.finish(task)
    assert least < 0, "no step asked for less than nothing"
    assert num_hits == (27 if caching and role != "decode" else 0)
    gpu = instance.manager.cache.stats().gpu
    assert gpu.num_private == gpu.num_callers == 0 and gpu.num_available == 24
    instance.manager.close()


@pytest.mark.processes
def test_without_prefix_caching_a_store_is_no_obstacle(tmp_path: Path) -> None:
    """A task that was never matched is written nowhere, and its blocks go home."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "capacity_bytes": 10**7}
    manager = PrefixCacheManager(new_config(8, 8, caching=False, storage=store), 1)
    launch(manager, SUFFIX)
    for number in range(4):
        task = Task(str(number), PROMPT, block_tables=manager.allocate_gpu_blocks(6, str(number)))
        manager.write_cache_to_storage(task)
        manager.recycle_gpu_blocks(task.block_tables, task.request_id)
    assert len(manager.gpu_free_block_list) == 8
    manager.close()
