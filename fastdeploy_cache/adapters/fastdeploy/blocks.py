"""FastDeploy's calls about single blocks and their pools."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from fastdeploy_cache.adapters.fastdeploy.current_cache import CurrentCache
from fastdeploy_cache.adapters.fastdeploy.task import NotEnoughBlocksError
from fastdeploy_cache.books.run import CPU, GPU
from fastdeploy_cache.errors import LifeCycleError, OutOfBlocksError, RequestError

T = TypeVar("T")


class BlockCalls:
    """The part of the adapter about blocks that are the caller's, or nobody's. Nothing here waits."""

    gpu_free_task_future: Future[int] | None = None

    def __init__(self, current: CurrentCache) -> None:
        self._current = current

    @property
    def available_gpu_resource(self) -> float:
        """Share of the GPU blocks that are free; 0.0 of an empty pool."""
        gpu = self._current.cache.blocks.view.tier_stats()
        return gpu.num_free / gpu.num_blocks if gpu.num_blocks else 0.0

    def can_allocate_gpu_blocks(self, num_blocks: int, try_free_gpu_blocks: bool = True) -> bool:
        """Whether so many blocks are free; where they are not, evicts exactly what is missing, if all of it can go.

        False while the GPU sleeps.
        """
        if self._current.cache.life.is_gpu_asleep:
            return False
        gpu = self._current.cache.blocks.view.tier_stats()
        missing = num_blocks - gpu.num_free
        if missing > 0 and try_free_gpu_blocks and missing <= gpu.num_evictable:
            missing -= self._current.cache.blocks.evict(missing)
        return missing <= 0

    def allocate_gpu_blocks(self, num_blocks: int, req_id: str | None = None) -> list[int]:  # noqa: ARG002
        """The lowest free ids, the caller's from now on; what is missing is evicted. None for a negative number: a
        scheduler that has allocated ahead asks for what it needs less what it has.

        Raises:
            NotEnoughBlocksError: nothing was changed.
        """
        if num_blocks <= 0:
            return []
        try:
            return self._current.cache.blocks.allocate(num_blocks)
        except OutOfBlocksError as error:
            raise NotEnoughBlocksError(error.missing, error.coming) from error
        except LifeCycleError as error:
            raise NotEnoughBlocksError(num_blocks, 0) from error

    def recycle_gpu_blocks(self, gpu_block_ids: int | Sequence[int], req_id: str | None = None) -> None:  # noqa: ARG002
        """The caller's blocks are free again; one or many.

        Raises:
            BlockOwnerError: one is not the caller's (any more); nothing was changed.
        """
        self._current.cache.blocks.free(_as_list(gpu_block_ids))

    def allocate_cpu_blocks(self, num_blocks: int) -> list[int]:
        """The same as `allocate_gpu_blocks`, in the CPU tier."""
        try:
            return self._current.cache.blocks.allocate(num_blocks, CPU)
        except OutOfBlocksError as error:
            raise NotEnoughBlocksError(error.missing, error.coming) from error

    def recycle_cpu_blocks(self, cpu_block_ids: int | Sequence[int]) -> None:
        """The same as `recycle_gpu_blocks`, in the CPU tier."""
        self._current.cache.blocks.free(_as_list(cpu_block_ids), CPU)

    def free_block_ids(self, need_block_num: int) -> int:
        """Evict exactly so many GPU blocks, or as many as can go; returns how many. Copies stay in the CPU tier."""
        return self._current.cache.blocks.evict(need_block_num, GPU)

    def free_block_ids_async(self, need_block_num: int) -> Future[int]:
        """`free_block_ids`, which never waits: the future is done."""
        self.gpu_free_task_future = done(lambda: self.free_block_ids(need_block_num))
        return self.gpu_free_task_future

    def free_cpu_block_ids(self, need_block_num: int) -> int:
        """Evict so many blocks of the CPU tier, or as many as can go; returns how many."""
        return self._current.cache.blocks.evict(need_block_num, CPU)

    def free_nodes_directly(self, node: Any) -> int:
        """Forget a node that has none behind it, and those before it up to the first that is held or has other
        children; returns how many. `node`: of `node_map`."""
        try:
            block_hash = bytes.fromhex(node.node_id)
        except (AttributeError, TypeError, ValueError) as error:
            raise RequestError(f"{node!r:.80} is no node of node_map: {error}") from error
        return self._current.cache.blocks.drop(block_hash) if block_hash else 0


def num_blocks_of(input_token_num: int, block_size: int) -> int:
    """Blocks for so many tokens."""
    return -(-input_token_num // block_size)


def _as_list(block_ids: int | Sequence[int]) -> Sequence[int]:
    try:
        return [operator.index(block_ids)]  # type: ignore[arg-type]  # one, of any integer type
    except TypeError:
        return block_ids  # type: ignore[return-value]


def done(call: Callable[[], T]) -> Future[T]:
    """What a call that never waits gives, or the error that it raises, as a future that is done."""
    future: Future[T] = Future()
    try:
        future.set_result(call())
    except (RequestError, OutOfBlocksError) as error:
        future.set_exception(error)
    return future
