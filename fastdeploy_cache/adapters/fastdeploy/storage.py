"""FastDeploy's swap and storage tasks: copies that a caller names block by block."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.held_tasks import HeldTasks
from fastdeploy_cache.adapters.fastdeploy.task import Task, new_request, path_hashes
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Event
from fastdeploy_cache.request import Request
from fastdeploy_cache.transfer_manager.task import TaskKind

_MAX_ANSWERS = 1024
_SWAPS = {"SWAP2CPU": TaskKind.SWAP_OUT, "SWAP2GPU": TaskKind.SWAP_IN}


class StorageCalls:
    """The part of the adapter that moves named blocks. Every wait ends at the ranks' own task deadline."""

    def __init__(self, current: CurrentCache, tasks: HeldTasks, *, load_timeout_seconds: float) -> None:
        self._current, self._tasks, self._load_timeout_seconds = current, tasks, load_timeout_seconds
        self.task_swapping_event: dict[str, Event] = {}  # of tasks that run now; set when they have ended
        self.task_write_back_event: dict[str, Event] = {}
        self.task_prefetch_event: dict[str, Event] = {}
        self.storage_prefetch_block_ids: dict[str, list[int]] = {}

    # -- swap

    def issue_swap_task(  # noqa: PLR0917 (theirs)
        self,
        transfer_task_id: str,
        swap_node_ids: Sequence[Any],
        gpu_block_ids: Sequence[int],
        cpu_block_ids: Sequence[int],
        event_type: Any,
        is_sync: bool = True,
    ) -> bool:
        """Copy between GPU and CPU blocks that the caller has allocated; waits, and says whether all ranks did it. The
        nodes are not looked at.

        `event_type`: SWAP2CPU or SWAP2GPU, by name or as an enumeration.

        Raises:
            RequestError: another event, or not `is_sync`. BlockOwnerError: a block is not the caller's.
        """
        del swap_node_ids
        kind = _SWAPS.get(str(getattr(event_type, "name", event_type)))
        if kind is None or not is_sync:
            raise RequestError(f"swap task of {event_type!r}, is_sync={is_sync}; use SWAP2CPU or SWAP2GPU, in sync")
        sources, destinations = gpu_block_ids, cpu_block_ids
        if kind is TaskKind.SWAP_IN:
            sources, destinations = cpu_block_ids, gpu_block_ids
        with _running(self.task_swapping_event, transfer_task_id):
            return self._current.cache.blocks.copies.copy(sources, destinations, kind=kind)

    def sync_swap_task(self, transfer_task_id: str) -> bool:
        """Wait for a swap task that another thread has issued; False when the tasks' own deadline is over first."""
        return self._wait(self.task_swapping_event, transfer_task_id)

    # -- write

    def write_cache_to_storage(self, request: Task) -> None:
        """Write what of a held task is cached to storage, in the background. Before release.

        Nothing happens without a store; nor, without prefix caching, to a task that was never matched: the scheduler
        calls this for each.

        Raises:
            UnknownTaskError: it holds nothing.
        """
        config = self._current.cache.config
        if config.storage is None or not (config.enable_prefix_caching or request in self._tasks):
            return
        held = self._tasks.get(request)
        self._tasks.show_proven(held)
        self._current.cache.write_to_storage(held.request)

    def write_cache_to_storage_decode(self, request: Task) -> bool:
        """Copy the full blocks of a task without a match, on a decode instance, from its `block_tables` to the CPU
        tier and on to storage, under the keys that any instance computes. Whether they were copied down in time."""
        if self._current.cache.config.storage is None:
            return False
        ours = new_request(request)
        num_blocks = (ours.num_tokens - 1) // self._current.block_size  # the last token's keys are not computed
        table = list(request.block_tables)[:num_blocks]  # type: ignore[attr-defined]
        return self._copy_down(ours, table, is_sync=True)

    def _copy_down(self, request: Request, table: Sequence[int], *, is_sync: bool) -> bool:
        transfer = self._current.cache.blocks.copies.swap_out(request, table)
        if not is_sync:
            return transfer.num_blocks > 0
        ended_well = transfer.wait(self._current.cache.config.transfer.task_timeout_seconds)
        # all of it, not what fitted
        return ended_well and self._current.cache.blocks.lookup(request).num_blocks >= len(table)

    def issue_write_back_storage_task(self, task: Any, is_sync: bool = True) -> bool:
        """`task`: `task_id`, `keys`, `gpu_block_ids` (the caller's), and `token_ids`, which name the blocks.

        Raises:
            ValueError: as many keys as blocks are needed. RequestError: no token ids.
        """
        request = self._request_of(task)
        with _running(self.task_write_back_event, task.task_id):
            return self._copy_down(request, task.gpu_block_ids, is_sync=is_sync)

    def wait_write_storage_task(self, req_id: str) -> bool:
        """Wait for a write that another thread has issued; False when the tasks' own deadline is over first."""
        return self._wait(self.task_write_back_event, req_id)

    # -- read

    def issue_prefetch_storage_task(self, task: Any, is_sync: bool = True) -> list[int]:  # noqa: ARG002
        """Bring blocks from storage into the caller's `gpu_block_ids`; returns those that all ranks have filled: the
        leading ones. `task` as for writing, with `start_read_block_idx` blocks already there.

        Always in sync; `timeout` seconds of the task at most, and never longer than the cache's own deadlines.
        """
        request = self._request_of(task)
        request.append_output([0])  # a prefetch leaves the last token to compute; here all blocks are wanted
        first = int(getattr(task, "start_read_block_idx", 0))
        with _running(self.task_prefetch_event, task.task_id):
            seconds = min(float(getattr(task, "timeout", self._load_timeout_seconds)), self._load_timeout_seconds)
            deadline = SYSTEM_CLOCK.now() + seconds
            self._current.cache.prefetch(request).wait(seconds)
            self._current.cache.end_prefetch(request)
            transfer = self._current.cache.blocks.copies.swap_in(request, task.gpu_block_ids, first_block=first)
            filled = transfer.wait(max(0.0, deadline - SYSTEM_CLOCK.now()))
            came = list(task.gpu_block_ids[: transfer.num_blocks]) if filled else []
            self.storage_prefetch_block_ids[task.task_id] = came  # until it is asked for, or 1,024 tasks later
            while len(self.storage_prefetch_block_ids) > _MAX_ANSWERS:
                self.storage_prefetch_block_ids.pop(next(iter(self.storage_prefetch_block_ids)))
            return came

    def wait_prefetch_storage_task(self, req_id: str) -> list[int]:
        """The blocks that a read has filled, waiting for one that another thread has issued; each once."""
        self._wait(self.task_prefetch_event, req_id)
        return self.storage_prefetch_block_ids.pop(req_id, [])

    def _wait(self, running: dict[str, Event], task_id: str) -> bool:
        event = running.get(task_id)
        return event is None or event.wait(self._current.cache.config.transfer.task_timeout_seconds)

    def _request_of(self, task: Any) -> Request:
        """What its blocks are named by: tokens, images and namespace, and keys that are not our own block hashes."""
        if len(task.keys) != len(task.gpu_block_ids):
            raise ValueError(f"task {task.task_id!r} has {len(task.keys)} keys for {len(task.gpu_block_ids)} blocks")
        tokens, size = getattr(task, "token_ids", None), self._current.block_size
        if tokens is None or not len(tokens):
            raise RequestError(f"task {task.task_id!r} has no token_ids; blocks are named by their tokens here")
        names = {"request_id": f"storage task {task.task_id}", "prompt_token_ids": tokens}
        named = SimpleNamespace(**names, **{n: getattr(task, n, None) for n in ("multimodal_inputs", "namespace")})
        request, first = new_request(named), int(getattr(task, "start_read_block_idx", 0))
        ours = [block_hash.hex() for block_hash in path_hashes(request, request.num_tokens // size, size)]
        keys = [str(key) for key in task.keys]
        if keys == ours[first : first + len(keys)]:
            return request
        spans = [(size * (first + i), size, key) for i, key in enumerate(keys)]
        return Request(**names, namespace=f"keys:{request.namespace}", images=spans, match_inside_images=True)


@contextmanager
def _running(running: dict[str, Event], task_id: str) -> Iterator[None]:
    """Others may wait for the task until it has ended, well or not."""
    event = running[task_id] = SYSTEM_CLOCK.event()
    try:
        yield
    finally:
        event.set()
        del running[task_id]
