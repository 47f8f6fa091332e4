"""FastDeploy's `PrefixCacheManager`, by its constructor, method names, arguments and returns, over ours.

Source: behaviour of PaddlePaddle FastDeploy's cache manager of spring 2026. docs/adapters/fastdeploy.md goes through it
call by call.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from fastdeploy_cache.adapters.fastdeploy.blocks import done, num_blocks_of
from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.launching import RankProcess
from fastdeploy_cache.adapters.fastdeploy.parts import Parts, Shown
from fastdeploy_cache.adapters.fastdeploy.task import (
    NotEnoughBlocksError,
    Task,
    UnknownTaskError,
    block_hash_extra_keys,
    is_inside_image,
)
from fastdeploy_cache.metrics.fastdeploy_names import FastDeployNames
from fastdeploy_cache.peers.transfers import Receive, Send

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

    FastDeploy's callers find all of this on one object, so most methods here only hand on, with the same
    arguments, to one of `parts`, which says what a call promises and raises.
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
        self.parts = Parts.of(
            current, tensor_parallel_size, load_timeout_seconds=load_timeout_seconds, schedules_ahead=schedules_ahead
        )

    cache = Shown(lambda parts: parts.current.cache)  # the native one; another after a launch, or with a new size
    splitwise_role = Shown(lambda parts: parts.current.splitwise_role)

    # -- v1: see `CallSequences`

    def request_match_blocks(
        self,
        task: Task,
        block_size: int,
        *_: object,  # theirs takes more, and does not look at it
    ) -> tuple[list[int], int, dict[str, Any]]:
        """The task's cached blocks, pinned until it is released; their tokens; where they came from."""
        return self.parts.sequences.request_match_blocks(task, block_size)

    def update_cache_blocks(self, task: Task, block_size: int, num_computed_tokens: int) -> None:
        """The first `num_computed_tokens` tokens are computed, or will be in the step that is scheduled."""
        self.parts.sequences.update_cache_blocks(task, block_size, num_computed_tokens)

    def cache_output_blocks(self, task: Task, block_size: int) -> None:
        """The task ends: what it has said is computed, but for the last token."""
        self.parts.sequences.cache_output_blocks(task, block_size)

    def release_block_ids(self, task: Task) -> None:
        """The task is over: what it holds of the cache is unpinned."""
        self.parts.sequences.release_block_ids(task)

    def release_block_ids_async(self, task: Task) -> Future[None]:
        """`release_block_ids`, which never waits: the future is done."""
        return done(lambda: self.release_block_ids(task))

    # -- v0: see `CallSequences`

    def request_block_ids(
        self, task: Task, block_size: int, dec_token_num: int = 0, *_: object
    ) -> tuple[list[int], list[int], dict[str, int]]:
        """The task's cached blocks, blocks of its own for the rest, and how many of the first were in which tier."""
        return self.parts.sequences.request_block_ids(task, block_size, dec_token_num)

    def mark_computed(self, task: Task, num_computed_tokens: int) -> None:
        """So many tokens of the task are computed by now: they are findable at once, and no more at its release."""
        self.parts.sequences.mark_computed(task, num_computed_tokens)

    # -- images

    @staticmethod
    def get_block_hash_extra_keys(request: Task, start_idx: int, end_idx: int, mm_idx: int) -> tuple[int, list[str]]:
        """The index of the image to look from next, and the hashes of the images that overlap tokens
        [start_idx, end_idx), looking from image `mm_idx` on. The index is never behind the last image."""
        return block_hash_extra_keys(request, start_idx, end_idx, mm_idx)

    @staticmethod
    def is_chunked_mm_input(mm_inputs: Any, matched_token_num: int) -> tuple[bool, int]:
        """Whether so many tokens end inside an image, and the index of that image; 0 where they do not."""
        return is_inside_image(mm_inputs, matched_token_num)

    # -- single blocks and their pools: see `BlockCalls`

    available_gpu_resource = Shown(lambda parts: parts.blocks.available_gpu_resource)
    gpu_free_task_future = Shown(lambda parts: parts.blocks.gpu_free_task_future)

    @staticmethod
    def get_required_block_num(input_token_num: int, block_size: int) -> int:
        """Blocks for so many tokens."""
        return num_blocks_of(input_token_num, block_size)

    def can_allocate_gpu_blocks(self, num_blocks: int, try_free_gpu_blocks: bool = True) -> bool:
        """Whether so many blocks are free, evicting what is missing."""
        return self.parts.blocks.can_allocate_gpu_blocks(num_blocks, try_free_gpu_blocks)

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[int]:  # noqa: ARG002
        """The lowest free ids, the caller's from now on."""
        return self.parts.blocks.allocate_gpu_blocks(num_blocks)

    def recycle_gpu_blocks(self, gpu_block_ids: int | Sequence[int], req_id: str | None = None) -> None:  # noqa: ARG002
        """The caller's blocks are free again; one or many."""
        self.parts.blocks.recycle_gpu_blocks(gpu_block_ids)

    def allocate_cpu_blocks(self, num_blocks: int) -> list[int]:
        """The same as `allocate_gpu_blocks`, in the CPU tier."""
        return self.parts.blocks.allocate_cpu_blocks(num_blocks)

    def recycle_cpu_blocks(self, cpu_block_ids: int | Sequence[int]) -> None:
        """The same as `recycle_gpu_blocks`, in the CPU tier."""
        self.parts.blocks.recycle_cpu_blocks(cpu_block_ids)

    def free_block_ids(self, need_block_num: int) -> int:
        """Evict so many GPU blocks, or as many as can go; returns how many."""
        return self.parts.blocks.free_block_ids(need_block_num)

    def free_block_ids_async(self, need_block_num: int) -> Future[int]:
        """`free_block_ids`, which never waits: the future is done."""
        return self.parts.blocks.free_block_ids_async(need_block_num)

    def free_cpu_block_ids(self, need_block_num: int) -> int:
        """Evict so many blocks of the CPU tier, or as many as can go; returns how many."""
        return self.parts.blocks.free_cpu_block_ids(need_block_num)

    def free_nodes_directly(self, node: Any) -> int:
        """Forget a node of `node_map` that has none behind it, and what then has none; returns how many."""
        return self.parts.blocks.free_nodes_directly(node)

    # -- looking in: see `Views`

    gpu_free_block_list = Shown(lambda parts: parts.views.gpu_free_block_list)
    cpu_free_block_list = Shown(lambda parts: parts.views.cpu_free_block_list)
    num_gpu_blocks = Shown(lambda parts: parts.views.num_gpu_blocks)
    num_cpu_blocks = Shown(lambda parts: parts.views.num_cpu_blocks)
    node_map = Shown(lambda parts: parts.views.node_map)
    radix_tree_root = Shown(lambda parts: parts.views.radix_tree_root)
    gpu_lru_leaf_heap = Shown(lambda parts: parts.views.gpu_lru_leaf_heap)
    gpu_lru_leaf_set = Shown(lambda parts: parts.views.gpu_lru_leaf_set)
    cpu_lru_leaf_heap = Shown(lambda parts: parts.views.cpu_lru_leaf_heap)
    cpu_lru_leaf_set = Shown(lambda parts: parts.views.cpu_lru_leaf_set)
    req_leaf_map = Shown(lambda parts: parts.views.req_leaf_map)
    leaf_req_map = Shown(lambda parts: parts.views.leaf_req_map)
    req_to_radix_tree_info = Shown(lambda parts: parts.views.req_to_radix_tree_info)
    unfilled_req_block_map = Shown(lambda parts: parts.views.unfilled_req_block_map)
    metrics = Shown(lambda parts: parts.views.metrics)
    kvcache_storage_backend = Shown(lambda parts: parts.views.kvcache_storage_backend)

    def fastdeploy_names(self, *, with_dp: bool = False) -> FastDeployNames:
        """A collector of FastDeploy's series, for `cache.serve_metrics(also=[...])`."""
        return self.parts.views.fastdeploy_names(with_dp=with_dp)

    # -- copies that the caller names block by block: see `StorageCalls`

    task_swapping_event = Shown(lambda parts: parts.storage.task_swapping_event)
    task_write_back_event = Shown(lambda parts: parts.storage.task_write_back_event)
    task_prefetch_event = Shown(lambda parts: parts.storage.task_prefetch_event)
    storage_prefetch_block_ids = Shown(lambda parts: parts.storage.storage_prefetch_block_ids)

    def issue_swap_task(  # noqa: PLR0917 (theirs)
        self,
        transfer_task_id: str,
        swap_node_ids: Sequence[Any],
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int],
        event_type: Any,
        is_sync: bool = True,
    ) -> bool:
        """Copy between GPU and CPU blocks of the caller's; whether all ranks did it. The nodes are not looked at."""
        del swap_node_ids
        copy = self.parts.storage.issue_swap_task
        return copy(transfer_task_id, gpu_block_ids, cpu_block_ids, event_type, is_sync=is_sync)

    def sync_swap_task(self, transfer_task_id: str) -> bool:
        """Wait for a swap task that another thread has issued; False where it is late."""
        return self.parts.storage.sync_swap_task(transfer_task_id)

    def write_cache_to_storage(self, request: Task) -> None:
        """Write what of a held task is cached to storage, in the background. Before release."""
        self.parts.storage.write_cache_to_storage(request)

    def write_cache_to_storage_decode(self, request: Task) -> bool:
        """Copy the full blocks of a task without a match to the CPU tier, and on to storage."""
        return self.parts.storage.write_cache_to_storage_decode(request)

    def issue_write_back_storage_task(self, task: Any, is_sync: bool = True) -> bool:
        """Write blocks that a storage task names."""
        return self.parts.storage.issue_write_back_storage_task(task, is_sync=is_sync)

    def wait_write_storage_task(self, req_id: str) -> bool:
        """Wait for a write that another thread has issued; False where it is late."""
        return self.parts.storage.wait_write_storage_task(req_id)

    def issue_prefetch_storage_task(self, task: Any, is_sync: bool = True) -> list[int]:  # noqa: ARG002
        """Read blocks that a storage task names, always in sync; returns those that all ranks have filled."""
        return self.parts.storage.issue_prefetch_storage_task(task)

    def wait_prefetch_storage_task(self, req_id: str) -> list[int]:
        """The blocks that a read has filled, waiting for one that another thread has issued; each once."""
        return self.parts.storage.wait_prefetch_storage_task(req_id)

    # -- prefill and decode apart: see `PeerCalls`

    def offer_blocks(self, task: Task) -> Send:
        """Offer the full blocks of a held task's tokens to a decode instance."""
        return self.parts.peers.offer_blocks(task)

    def begin_step(self, task: Task, num_computed_tokens: int, step: int) -> None:
        """Tell of a step that computes the task's tokens up to there, before it begins."""
        self.parts.peers.begin_step(task, num_computed_tokens, step)

    def cancel_send(self, send: Send) -> None:
        """Nobody is to read it any more."""
        self.parts.peers.cancel_send(send)

    def receive_blocks(self, task: Task, offer: bytes) -> Receive:
        """Bring what a prefill instance offers of the task's tokens to the GPU; returns at once."""
        return self.parts.peers.receive_blocks(task, offer)

    def cancel_receive(self, task: Task) -> None:
        """The task has gone, and no `request_match_blocks` follows: what has come may be evicted."""
        self.parts.peers.cancel_receive(task)

    # -- processes and states: see `Launcher`

    shm_cache_task_flag_broadcast = Shown(lambda parts: parts.launcher.signals["cache_task_broadcast_signal"])
    cache_task_is_paused_signal = Shown(lambda parts: parts.launcher.signals["cache_task_is_paused"])
    cache_task_inflight_signal = Shown(lambda parts: parts.launcher.signals["cache_task_inflight"])
    cache_ready_signal = Shown(lambda parts: parts.launcher.signals["cache_ready_signal"])
    swap_space_ready_signal = Shown(lambda parts: parts.launcher.signals["swap_space_ready_signal"])
    cache_transfer_inited_signal = Shown(lambda parts: parts.launcher.signals["cache_transfer_inited_signal"])
    prefix_tree_status_signal = Shown(lambda parts: parts.launcher.signals["prefix_tree_status"])

    def launch_cache_manager(  # noqa: PLR0917 (theirs)
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Sequence[int],
        pod_ip: str,
        engine_worker_queue_port: int | str,
        ipc_suffix: int | str,
        create_cache_tensor: bool = True,
    ) -> list[RankProcess]:
        """Start the ranks, and the peer processes where the role needs them. The first argument and the last two are
        not used."""
        del cache_config, ipc_suffix, create_cache_tensor
        launch = self.parts.launcher.launch_cache_manager
        return launch(tensor_parallel_size, device_ids, pod_ip, engine_worker_queue_port)

    def launch_cache_messager(  # noqa: PLR0917 (theirs)
        self,
        cache_config: Any,
        tensor_parallel_size: int,
        device_ids: Sequence[int],
        key_cache_shape: Any,
        value_cache_shape: Any,
        pod_ip: str,
        engine_worker_queue_port: int | str,
        ipc_suffix: int | str,
    ) -> list[RankProcess] | None:
        """The ranks' peer processes, ready; None where they are not in time. Configuration, shapes and `ipc_suffix` are
        not used."""
        del cache_config, key_cache_shape, value_cache_shape, ipc_suffix
        launch = self.parts.launcher.launch_cache_messager
        return launch(tensor_parallel_size, device_ids, pod_ip, engine_worker_queue_port)

    def update_cache_config(self, cache_config: Any) -> None:
        """Take over a new pool size, after profiling."""
        self.parts.launcher.update_cache_config(cache_config)

    def control(self, verb: str, args: Mapping[str, Any] | None = None) -> tuple[int, str]:
        """One of pause, resume, sleep, wakeup, clear, update_weights: a status as of HTTP, and what there is to say."""
        return self.parts.launcher.control(verb, args)

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
