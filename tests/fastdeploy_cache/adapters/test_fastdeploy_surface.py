"""Every name that FastDeploy's callers use of its cache manager is there, or its page says that it is not."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import new_config
from tests.rigs.original_surface import Surface, missing, unnamed

TASKS: Surface = {
    "request_match_blocks": ("task", "block_size"),
    "update_cache_blocks": ("task", "block_size", "num_computed_tokens"),
    "cache_output_blocks": ("task", "block_size"),
    "request_block_ids": ("task", "block_size", "dec_token_num"),
    "release_block_ids": ("task",),
    "release_block_ids_async": ("task",),
    "get_block_hash_extra_keys": ("request", "start_idx", "end_idx", "mm_idx"),
    "is_chunked_mm_input": ("mm_inputs", "matched_token_num"),
}
BLOCKS: Surface = {
    "available_gpu_resource": None,
    "get_required_block_num": ("input_token_num", "block_size"),
    "can_allocate_gpu_blocks": ("num_blocks", "try_free_gpu_blocks"),
    "allocate_gpu_blocks": ("num_blocks", "req_id"),
    "recycle_gpu_blocks": ("gpu_block_ids", "req_id"),
    "allocate_cpu_blocks": ("num_blocks",),
    "recycle_cpu_blocks": ("cpu_block_ids",),
    "free_block_ids": ("need_block_num",),
    "free_block_ids_async": ("need_block_num",),
    "free_cpu_block_ids": ("need_block_num",),
    "free_nodes_directly": ("node",),
}
VIEWS: Surface = dict.fromkeys(
    (
        *("gpu_free_block_list", "cpu_free_block_list", "num_gpu_blocks", "num_cpu_blocks", "node_map"),
        *("radix_tree_root", "gpu_lru_leaf_heap", "gpu_lru_leaf_set", "cpu_lru_leaf_heap", "cpu_lru_leaf_set"),
        *("req_leaf_map", "leaf_req_map", "req_to_radix_tree_info", "unfilled_req_block_map", "metrics"),
        *("kvcache_storage_backend", "gpu_free_task_future", "task_swapping_event", "task_write_back_event"),
        *("task_prefetch_event", "storage_prefetch_block_ids", "splitwise_role"),
    )
)
SIGNALS: Surface = dict.fromkeys(
    (
        *("shm_cache_task_flag_broadcast", "cache_task_is_paused_signal", "cache_task_inflight_signal"),
        *("cache_ready_signal", "swap_space_ready_signal", "cache_transfer_inited_signal"),
        "prefix_tree_status_signal",
    )
)
PLACES = ("pod_ip", "engine_worker_queue_port", "ipc_suffix")
RANKS = ("cache_config", "tensor_parallel_size", "device_ids")
NODES = ("transfer_task_id", "swap_node_ids", "gpu_block_ids", "cpu_block_ids", "event_type", "is_sync")
PROCESSES: Surface = {
    "launch_cache_manager": (*RANKS, *PLACES, "create_cache_tensor"),
    "launch_cache_messager": (*RANKS, "key_cache_shape", "value_cache_shape", *PLACES),
    "update_cache_config": ("cache_config",),
    "reset": ("wait_for_tasks_done",),
    "issue_swap_task": NODES,
    "sync_swap_task": ("transfer_task_id",),
    "write_cache_to_storage": ("request",),
    "write_cache_to_storage_decode": ("request",),
    "issue_write_back_storage_task": ("task", "is_sync"),
    "wait_write_storage_task": ("req_id",),
    "issue_prefetch_storage_task": ("task", "is_sync"),
    "wait_prefetch_storage_task": ("req_id",),
}
NOT_HERE = ("match_block", "build_path", "clear_prefix_cache", "recv_data_transfer_result", "node_id_pool")


@pytest.fixture
def manager() -> Iterator[PrefixCacheManager]:
    made = PrefixCacheManager(new_config(), 1)
    yield made
    made.close()


@pytest.mark.parametrize("surface", [TASKS, BLOCKS, VIEWS, SIGNALS, PROCESSES])
def test_names_are_there(manager: PrefixCacheManager, surface: Surface) -> None:
    """Each call takes what its callers give, in that order and by those names; each attribute can be read."""
    assert missing(manager, surface) == []


@pytest.mark.parametrize("name", [*VIEWS, *SIGNALS])
def test_attributes_are_shown_and_not_set(manager: PrefixCacheManager, name: str) -> None:
    """What is shown comes from the cache: to set it fails, instead of hiding what is true."""
    shown = getattr(manager, name)
    with pytest.raises(AttributeError, match="nobody can set it"):
        setattr(manager, name, None)
    assert type(getattr(manager, name)) is type(shown)


def test_the_page_says_what_is_not_there(manager: PrefixCacheManager) -> None:
    """Names of the original that are missing here are named in its page."""
    assert not [name for name in NOT_HERE if hasattr(manager, name)]
    assert unnamed("fastdeploy.md", NOT_HERE) == []
