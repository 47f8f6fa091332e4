"""FastDeploy's manager under odd orders of calls, refusals midway, and changes of life: nothing wrong, nothing left."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager, UnknownTaskError
from fastdeploy_cache.errors import CacheError, ConfigError, LifeCycleError, RequestError, StorageRefusedError
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    SUFFIX,
    Kernel,
    Task,
    give_up_v1,
    images,
    launch,
    new_config,
    serve_v0,
    serve_v1,
    with_cpu,
)


def test_an_image_that_the_prompt_cuts_is_part_of_its_key(manager: PrefixCacheManager) -> None:
    """A cat and a dog that both go on behind the prompt's end share nothing from there on."""
    assert serve_v1(manager, Task("a", PROMPT, multimodal_inputs=images((10, 50, "cat"))), [1]) == 0
    assert serve_v1(manager, Task("b", PROMPT, multimodal_inputs=images((10, 50, "dog"))), [1]) == 8
    assert serve_v1(manager, Task("c", PROMPT), [1]) == 8


def test_a_task_aborted_in_prefill_leaves_no_block_that_nobody_computed(manager: PrefixCacheManager) -> None:
    """cache_output_blocks of a task that has said nothing keeps what update_cache_blocks told of."""
    task = Task("a", PROMPT)
    manager.request_match_blocks(task, 4)
    task.block_tables = manager.allocate_gpu_blocks(6)
    manager.update_cache_blocks(task, 4, 4)
    manager.cache_output_blocks(task, 4)
    give_up_v1(manager, task)
    assert serve_v1(manager, Task("b", PROMPT), [1]) == 4


@pytest.mark.parametrize("reserve", [-50, 1.5, None])
def test_a_v0_request_refused_by_its_arguments_can_be_asked_again(manager: PrefixCacheManager, reserve: object) -> None:
    """Whatever is wrong with it, nothing is held."""
    task = Task("a", PROMPT)
    with pytest.raises((RequestError, TypeError)):
        manager.request_block_ids(task, 4, reserve)  # type: ignore[arg-type]
    assert serve_v0(manager, task, [1])[0] == 0


def test_a_v0_request_while_asleep_can_be_asked_again(manager: PrefixCacheManager) -> None:
    """It is refused, holds nothing, and is served after wakeup."""
    manager.control("sleep")
    task = Task("a", PROMPT)
    with pytest.raises(LifeCycleError):
        manager.request_block_ids(task, 4, 4)
    with pytest.raises(UnknownTaskError):
        manager.release_block_ids(task)
    manager.control("wakeup")
    assert serve_v0(manager, task, [1])[0] == 0


def test_refused_updates_change_nothing(manager: PrefixCacheManager) -> None:
    """More computed than there is, in both sequences: the task goes on, and is released like any other."""
    first = Task("a", PROMPT)
    manager.request_block_ids(first, 4, 0)
    with pytest.raises(RequestError, match="1000 tokens of 'a'"):
        manager.mark_computed(first, 1000)
    first.output_token_ids = [1]
    manager.release_block_ids(first)
    second = Task("b", PROMPT[:10])
    second.block_tables, _, _ = manager.request_match_blocks(second, 4)
    second.block_tables += manager.allocate_gpu_blocks(5)
    with pytest.raises(RequestError, match="20 tokens of 'b'"):
        manager.update_cache_blocks(second, 4, 20)
    assert second.num_cached_blocks == 2
    give_up_v1(manager, second)


def test_a_bad_output_token_does_not_keep_a_task(manager: PrefixCacheManager) -> None:
    """Its release raises, and has released."""
    task = Task("a", PROMPT)
    manager.request_block_ids(task, 4, 0)
    task.output_token_ids = [-1, 3]
    with pytest.raises(CacheError):
        manager.release_block_ids(task)
    with pytest.raises(UnknownTaskError):
        manager.release_block_ids(task)


def test_a_task_that_takes_no_attribute_holds_nothing(manager: PrefixCacheManager) -> None:
    """num_cached_blocks cannot be written: refused, and the id can be used again."""

    class Sealed:
        __slots__ = ()
        request_id, prompt_token_ids, output_token_ids = "a", PROMPT, ()

    for call in (manager.request_match_blocks, manager.request_block_ids):
        with pytest.raises(AttributeError):
            call(Sealed(), 4)
    assert serve_v1(manager, Task("a", PROMPT), [1]) == 0


def test_a_preempted_task_is_counted_once_and_keeps_no_outputs_where_they_are_off() -> None:
    """It comes back with outputs: matched over all, cached as far as its prompt, one request in the metrics."""
    manager = PrefixCacheManager(new_config(outputs=False), 1, schedules_ahead=False)
    task = Task("a", PROMPT[:10])
    for outputs in ([], [1, 2, 3, 4, 5, 6]):
        task.output_token_ids = outputs
        manager.request_match_blocks(task, 4)
        task.block_tables = task.block_tables[:0] + manager.allocate_gpu_blocks(4)
        held = manager.parts.tasks.get(task)
        task.block_tables = manager.cache.blocks.lookup(held.request).block_ids + task.block_tables
        manager.update_cache_blocks(task, 4, task.num_total_tokens)
        give_up_v1(manager, task)
    assert len(manager.node_map) == 2
    assert manager.cache.metrics.token_counts()[0] == 10
    manager.close()


def test_an_engine_that_schedules_ahead_publishes_what_is_computed_for_certain() -> None:
    """update_cache_blocks hands blocks over and shows nothing; mark_computed does, or a token that the task has said;
    0 takes the promise back; the release of a task that has said nothing shows nothing."""
    manager = PrefixCacheManager(new_config(), 1)
    tasks = [Task("a", PROMPT), Task("b", PROMPT), Task("c", PROMPT), Task("d", PROMPT)]
    for task, marked, num_found in zip(tasks, (0, 8, None, None), (0, 0, 8, 8), strict=True):
        task.block_tables, num_matched, _ = manager.request_match_blocks(task, 4)
        assert num_matched == num_found
        task.block_tables += manager.allocate_gpu_blocks(6 - len(task.block_tables))
        before = len(manager.node_map)
        manager.update_cache_blocks(task, 4, 22)
        assert len(manager.node_map) == before
        if marked is not None:
            manager.mark_computed(task, marked)
        if task is not tasks[-1]:
            give_up_v1(manager, task)
    assert len(manager.node_map) == 2, "released before its step had run"
    tasks[-1].output_token_ids.append(1)
    other = Task("e", PROMPT)
    assert manager.request_match_blocks(other, 4)[1] == 20, "found while the first one goes on"
    give_up_v1(manager, tasks[-1])
    give_up_v1(manager, other)
    assert len(manager.node_map) == 5
    manager.close()


@pytest.mark.parametrize("verb", ["clear", "update_weights", "sleep"])
def test_blocks_from_before_a_change_are_never_found(verb: str) -> None:
    """Taken before, handed over after: they publish nothing; what comes later is served right."""
    manager = with_cpu(16, 16, transfer_client="inline")
    kernel, task = Kernel(manager), Task("a", PROMPT)
    early = manager.allocate_gpu_blocks(6)
    assert manager.control(verb)[0] == 200
    if verb == "sleep":
        assert manager.control("wakeup")[0] == 200
    manager.request_match_blocks(task, 4)
    task.block_tables = early
    manager.update_cache_blocks(task, 4, 22)
    assert manager.node_map == {}
    give_up_v1(manager, task)
    assert serve_v1(manager, Task("b", PROMPT), [1], kernel) == 0
    assert serve_v1(manager, Task("c", PROMPT), [1], kernel) == 20
    manager.close()


@pytest.mark.processes
def test_storage_tasks_with_other_keys_are_other_blocks() -> None:
    """Equal tokens, keys of two images: one is not the other, nor the plain prompt."""
    manager = with_cpu(16, 16)
    own = manager.allocate_gpu_blocks(2)
    Kernel(manager).compute(PROMPT, own, 0, 8)

    def task(keys: list[str]) -> SimpleNamespace:
        return SimpleNamespace(task_id="t", keys=keys, token_ids=PROMPT[:8], gpu_block_ids=own)

    assert manager.issue_write_back_storage_task(task(["cat1", "cat2"]))
    assert manager.issue_prefetch_storage_task(task(["dog1", "dog2"])) == []
    assert manager.issue_prefetch_storage_task(task(["cat1", "cat2"])) == own
    assert serve_v1(manager, Task("a", PROMPT), [1]) == 0
    manager.control("pause")
    assert not manager.issue_write_back_storage_task(task(["new1", "new2"])), "nothing was copied"
    manager.recycle_gpu_blocks(own)
    manager.close()


@pytest.mark.processes
def test_a_refused_change_of_weights_keeps_the_store(tmp_path: Path) -> None:
    """A wrong id is refused before anything is touched; the right one is taken afterwards."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "capacity_bytes": 10**7}
    manager = with_cpu(16, 16, storage=store)
    assert manager.control("update_weights", {"weights_id": 5})[0] == 400
    assert manager.cache.stats().storage is not None
    assert manager.control("update_weights", {"weights_id": "w2"}) == (200, "running")
    assert manager.cache.stats().storage is not None
    manager.close()


@pytest.mark.processes
def test_a_new_size_with_a_store_and_a_new_launch(tmp_path: Path) -> None:
    """The old cache ends before the new one begins; handles see the new ranks; the same suffix is taken again."""
    store = {"kind": "file", "folder": str(tmp_path), "weights_id": "w", "capacity_bytes": 10**7}
    config = new_config(16, 16, storage=store)
    manager = PrefixCacheManager(config, 1)
    processes = launch(manager, SUFFIX)
    resized = SimpleNamespace(**vars(config.cache_config) | {"total_block_num": 24})
    manager.update_cache_config(resized)
    assert manager.num_gpu_blocks == 24 and processes[0].poll() is None and processes[0].pid
    held = manager.allocate_gpu_blocks(1)
    with pytest.raises(ConfigError, match="1 blocks are held"):
        manager.update_cache_config(config.cache_config)
    assert manager.parts.current.their_config.cache_config is resized
    manager.recycle_gpu_blocks(np.int64(held[0]))  # type: ignore[arg-type]
    launch(manager, SUFFIX)
    assert serve_v1(manager, Task("a", PROMPT), [1], Kernel(manager)) == 0
    manager.close()


@pytest.mark.processes
def test_a_launch_that_fails_leaves_a_manager_without_ranks(tmp_path: Path) -> None:
    """The store's folder is a file: refused; the GPU tier goes on, and a later launch works."""
    folder = tmp_path / "store"
    folder.touch()
    store = {"kind": "file", "folder": str(folder), "weights_id": "w", "capacity_bytes": 10**7}
    manager = PrefixCacheManager(new_config(16, 16, storage=store), 1)
    with pytest.raises(StorageRefusedError, match="store"):
        launch(manager, SUFFIX)
    assert serve_v1(manager, Task("a", PROMPT), [1]) == 0
    folder.unlink()
    manager.free_block_ids(16)
    launch(manager, SUFFIX)
    manager.close()
    assert not list(Path("/dev/shm").glob(f"*.{SUFFIX}"))


@pytest.mark.parametrize("prompt", [[], list(range(33 * 4))])
def test_a_match_that_fails_is_released_without_an_error_once(manager: PrefixCacheManager, prompt: list[int]) -> None:
    """The v1 scheduler releases what it could not match in the midst of a step: an error there would lose the blocks
    of the step's other tasks. A second release is an error, as of any task that holds nothing."""
    task = Task("a", prompt)
    with pytest.raises(RequestError):
        manager.request_match_blocks(task, 4)
    give_up_v1(manager, task)
    with pytest.raises(UnknownTaskError):
        manager.release_block_ids(task)
    task.prompt_token_ids = PROMPT
    with pytest.raises(ConfigError):
        manager.request_match_blocks(task, 8)
    assert serve_v1(manager, task, [1]) == 0


def test_a_task_that_is_matched_twice_is_still_released(manager: PrefixCacheManager) -> None:
    """The second match is refused, and the release is of the first."""
    task = Task("a", PROMPT)
    manager.request_match_blocks(task, 4)
    with pytest.raises(RequestError):
        manager.request_match_blocks(task, 4)
    manager.release_block_ids(task)
    with pytest.raises(UnknownTaskError):
        manager.release_block_ids(task)


def test_the_free_blocks_are_a_list_to_read(manager: PrefixCacheManager) -> None:
    """Lowest first, with a length that costs no walk; it is true at each look."""
    free = manager.gpu_free_block_list
    assert len(free) == 32 and free[0] == 0 and free[-2:] == [30, 31] and list(free) == list(range(32))
    taken = manager.allocate_gpu_blocks(3)
    assert len(free) == 29 and 2 not in free and free == list(range(3, 32)) and free != [] and repr(free)[:4] == "[3, "
    manager.recycle_gpu_blocks(taken)
