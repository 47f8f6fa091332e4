"""FastDeploy's `PrefixCacheManager`, by its constructor, method names, arguments and returns, over ours.

Source: behaviour of PaddlePaddle FastDeploy's cache manager of spring 2026. docs/adapters/fastdeploy.md goes through it
call by call.
"""

from __future__ import annotations

from typing import Any

from fastdeploy_cache.adapters.fastdeploy.blocks import BlockCalls, num_blocks_of
from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.launching import Launcher
from fastdeploy_cache.adapters.fastdeploy.parts import Handed, Parts, Shown
from fastdeploy_cache.adapters.fastdeploy.peers import PeerCalls
from fastdeploy_cache.adapters.fastdeploy.sequences import CallSequences
from fastdeploy_cache.adapters.fastdeploy.storage import StorageCalls
from fastdeploy_cache.adapters.fastdeploy.task import (
    NotEnoughBlocksError,
    UnknownTaskError,
    block_hash_extra_keys,
    is_inside_image,
)
from fastdeploy_cache.adapters.fastdeploy.views import FreeBlockList, Views
from fastdeploy_cache.books.run import CPU, GPU

__all__ = ["NotEnoughBlocksError", "PrefixCacheManager", "UnknownTaskError"]


class PrefixCacheManager:
    """Two call sequences, any thread; calls for one request come one at a time.

    v0: `request_block_ids`, compute, `release_block_ids`.

    v1: `can_allocate_gpu_blocks`, `request_match_blocks`, `allocate_gpu_blocks` and `update_cache_blocks` for each
    chunk, `cache_output_blocks`, `write_cache_to_storage`, `release_block_ids`, `recycle_gpu_blocks` of what is behind
    `task.num_cached_blocks`. Ids from `allocate_gpu_blocks` are the caller's until they are recycled, or until
    `update_cache_blocks` hands them to the cache; one that is given back by a non-owner is refused.

    Both schedulers hand blocks over before a worker has computed them. They become visible once the task's
    `output_token_ids` have grown since its match, which says that all before its last token is computed; or by
    `mark_computed`. Of a task that has said nothing, nothing becomes visible, not at its release either.

    FastDeploy's callers find all of this on one object, so most of what is here is a call of one of `parts`, where it
    says what it promises and raises.
    """

    def __init__(
        self,
        config: Any,
        tensor_parallel_size: int,
        splitwise_role: str = "mixed",
        local_data_parallel_id: int = 0,
        *,
        load_timeout_seconds: float = 5.0,
        schedules_ahead: bool = True,
    ) -> None:
        """Make the pools; `launch_cache_manager` starts the ranks. Until then there is a GPU tier and no other.

        `load_timeout_seconds`: how long a match waits for blocks from below the GPU; what is late is computed.
        `schedules_ahead`: the engine calls `update_cache_blocks` as it schedules a step, as FastDeploy's does. With
        False it calls that when the step has ended, and the blocks are visible from then on.

        Raises:
            ConfigError: an impossible setting.
        """
        current = CurrentCache(
            config, tp_size=tensor_parallel_size, splitwise_role=splitwise_role, data_parallel_id=local_data_parallel_id
        )
        self.parts = Parts(
            current, tensor_parallel_size, load_timeout_seconds=load_timeout_seconds, schedules_ahead=schedules_ahead
        )

    cache = Shown(lambda parts: parts.current.cache)  # the native one; another after a launch, or with a new size
    splitwise_role = Shown(lambda parts: parts.current.splitwise_role)

    # -- requests, by the v1 scheduler and by the v0 scheduler

    request_match_blocks = Handed(lambda parts: parts.sequences, CallSequences.request_match_blocks)
    update_cache_blocks = Handed(lambda parts: parts.sequences, CallSequences.update_cache_blocks)
    cache_output_blocks = Handed(lambda parts: parts.sequences, CallSequences.cache_output_blocks)
    release_block_ids = Handed(lambda parts: parts.sequences, CallSequences.release_block_ids)
    release_block_ids_async = Handed(lambda parts: parts.sequences, CallSequences.release_block_ids_async)
    request_block_ids = Handed(lambda parts: parts.sequences, CallSequences.request_block_ids)
    mark_computed = Handed(lambda parts: parts.sequences, CallSequences.mark_computed)

    # -- images

    get_block_hash_extra_keys = staticmethod(block_hash_extra_keys)
    is_chunked_mm_input = staticmethod(is_inside_image)

    # -- single blocks and their pools

    get_required_block_num = staticmethod(num_blocks_of)
    available_gpu_resource = Shown(lambda parts: parts.blocks.available_gpu_resource)
    gpu_free_task_future = Shown(lambda parts: parts.blocks.gpu_free_task_future)
    can_allocate_gpu_blocks = Handed(lambda parts: parts.blocks, BlockCalls.can_allocate_gpu_blocks)
    allocate_gpu_blocks = Handed(lambda parts: parts.blocks, BlockCalls.allocate_gpu_blocks)
    recycle_gpu_blocks = Handed(lambda parts: parts.blocks, BlockCalls.recycle_gpu_blocks)
    allocate_cpu_blocks = Handed(lambda parts: parts.blocks, BlockCalls.allocate_cpu_blocks)
    recycle_cpu_blocks = Handed(lambda parts: parts.blocks, BlockCalls.recycle_cpu_blocks)
    free_block_ids = Handed(lambda parts: parts.blocks, BlockCalls.free_block_ids)
    free_block_ids_async = Handed(lambda parts: parts.blocks, BlockCalls.free_block_ids_async)
    free_cpu_block_ids = Handed(lambda parts: parts.blocks, BlockCalls.free_cpu_block_ids)
    free_nodes_directly = Handed(lambda parts: parts.blocks, BlockCalls.free_nodes_directly)

    # -- looking in

    gpu_free_block_list = Shown(lambda parts: FreeBlockList(parts.current, GPU))
    cpu_free_block_list = Shown(lambda parts: FreeBlockList(parts.current, CPU))
    num_gpu_blocks = Shown(lambda parts: parts.current.cache.blocks.view.tier_stats(GPU).num_blocks)
    num_cpu_blocks = Shown(lambda parts: parts.current.cache.blocks.view.tier_stats(CPU).num_blocks)
    node_map = Shown(lambda parts: parts.views.nodes().by_hash)
    radix_tree_root = Shown(lambda parts: parts.views.nodes().root)
    gpu_lru_leaf_heap = Shown(lambda parts: parts.views.lru_leaf_heap(GPU))
    gpu_lru_leaf_set = Shown(lambda parts: parts.views.lru_leaf_set(GPU))
    cpu_lru_leaf_heap = Shown(lambda parts: parts.views.lru_leaf_heap(CPU))
    cpu_lru_leaf_set = Shown(lambda parts: parts.views.lru_leaf_set(CPU))
    req_leaf_map = Shown(lambda parts: parts.views.req_leaf_map)
    leaf_req_map = Shown(lambda parts: parts.views.leaf_req_map)
    req_to_radix_tree_info = Shown(lambda parts: parts.views.req_to_radix_tree_info)
    unfilled_req_block_map = Shown(lambda parts: parts.views.unfilled_req_block_map)
    metrics = Shown(lambda parts: parts.current.cache.metrics.hit_rates())
    kvcache_storage_backend = Shown(lambda parts: parts.views.kvcache_storage_backend)
    fastdeploy_names = Handed(lambda parts: parts.views, Views.fastdeploy_names)

    # -- copies that the caller names block by block

    task_swapping_event = Shown(lambda parts: parts.storage.task_swapping_event)
    task_write_back_event = Shown(lambda parts: parts.storage.task_write_back_event)
    task_prefetch_event = Shown(lambda parts: parts.storage.task_prefetch_event)
    storage_prefetch_block_ids = Shown(lambda parts: parts.storage.storage_prefetch_block_ids)
    issue_swap_task = Handed(lambda parts: parts.storage, StorageCalls.issue_swap_task)
    sync_swap_task = Handed(lambda parts: parts.storage, StorageCalls.sync_swap_task)
    write_cache_to_storage = Handed(lambda parts: parts.storage, StorageCalls.write_cache_to_storage)
    write_cache_to_storage_decode = Handed(lambda parts: parts.storage, StorageCalls.write_cache_to_storage_decode)
    issue_write_back_storage_task = Handed(lambda parts: parts.storage, StorageCalls.issue_write_back_storage_task)
    wait_write_storage_task = Handed(lambda parts: parts.storage, StorageCalls.wait_write_storage_task)
    issue_prefetch_storage_task = Handed(lambda parts: parts.storage, StorageCalls.issue_prefetch_storage_task)
    wait_prefetch_storage_task = Handed(lambda parts: parts.storage, StorageCalls.wait_prefetch_storage_task)

    # -- prefill and decode apart

    offer_blocks = Handed(lambda parts: parts.peers, PeerCalls.offer_blocks)
    begin_step = Handed(lambda parts: parts.peers, PeerCalls.begin_step)
    cancel_send = Handed(lambda parts: parts.peers, PeerCalls.cancel_send)
    receive_blocks = Handed(lambda parts: parts.peers, PeerCalls.receive_blocks)
    cancel_receive = Handed(lambda parts: parts.peers, PeerCalls.cancel_receive)

    # -- processes and states

    shm_cache_task_flag_broadcast = Shown(lambda parts: parts.launcher.signals["cache_task_broadcast_signal"])
    cache_task_is_paused_signal = Shown(lambda parts: parts.launcher.signals["cache_task_is_paused"])
    cache_task_inflight_signal = Shown(lambda parts: parts.launcher.signals["cache_task_inflight"])
    cache_ready_signal = Shown(lambda parts: parts.launcher.signals["cache_ready_signal"])
    swap_space_ready_signal = Shown(lambda parts: parts.launcher.signals["swap_space_ready_signal"])
    cache_transfer_inited_signal = Shown(lambda parts: parts.launcher.signals["cache_transfer_inited_signal"])
    prefix_tree_status_signal = Shown(lambda parts: parts.launcher.signals["prefix_tree_status"])
    launch_cache_manager = Handed(lambda parts: parts.launcher, Launcher.launch_cache_manager)
    launch_cache_messager = Handed(lambda parts: parts.launcher, Launcher.launch_cache_messager)
    update_cache_config = Handed(lambda parts: parts.launcher, Launcher.update_cache_config)
    control = Handed(lambda parts: parts.launcher, Launcher.control)

    def reset(self, wait_for_tasks_done: bool = False) -> None:
        """Forget every prefix. Running tasks keep their blocks until they give them back."""
        if wait_for_tasks_done:
            self.cache.life.clear()
        else:
            self.cache.reset()

    def close(self) -> None:
        """End the ranks, remove the signals."""
        self.parts.launcher.close()
        self.cache.close()
