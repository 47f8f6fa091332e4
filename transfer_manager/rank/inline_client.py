"""The same contract as that of the ranks, without any process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.errors import DeviceError, LayoutError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult
from fastdeploy_cache.transfer_manager.device.base import copy_task
from fastdeploy_cache.transfer_manager.device.cpu import CpuDevice
from fastdeploy_cache.transfer_manager.device.images import ImageMove
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory, KVViews
from fastdeploy_cache.transfer_manager.kv.tensors import local_segments
from fastdeploy_cache.transfer_manager.rank.memory import create_rank_memory, release_pages, retake_pages
from fastdeploy_cache.transfer_manager.rank.transfer_client import (
    KVArrays,
    OnKVLost,
    TransferClient,
    ignore_kv_lost,
)
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask


def _all_of(steps: ImageMove) -> int:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return int(end.value)


class InlineClient(TransferClient):
    """No processes: `submit` copies in the caller's thread. Without a layout it moves no bytes (simulation).

    With `own_kv` False the KV arrays are those that `attach_kv` brings, arrays of this very process.
    """

    def __init__(
        self,
        layout: RankLayout | None,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        tp_size: int = 1,
        own_kv: bool = True,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._now = clock.now
        self._layout, self._num_gpu_blocks, self._tp_size = layout, num_gpu_blocks, tp_size
        memory = create_rank_memory(tp_size, layout, num_gpu_blocks, num_cpu_blocks, own_kv) if layout else []
        self._memory = memory
        self._devices: dict[int, CpuDevice] = {}
        self._attached: dict[int, Sequence[Mapping[str, Any]]] = {}  # kept alive
        self._images = []
        for rank, each in enumerate(memory):
            assert layout is not None
            shape = (num_cpu_blocks, layout.block_bytes)
            self._images.append(each.cpu.view(np.uint8, shape) if num_cpu_blocks else np.empty(shape, np.uint8))
            if each.kv is not None:
                device = CpuDevice(layout, each.kv.flat(), each.kv.places, self._images[rank], num_gpu_blocks)
                self._devices[rank] = device
        self._on_result: OnResult | None = None
        self._open = False

    def start(self, on_result: OnResult, on_kv_lost: OnKVLost = ignore_kv_lost) -> None:  # noqa: ARG002
        self._on_result = on_result
        self._open = True

    def submit(self, task: TransferTask) -> None:
        assert self._on_result is not None, "submit before start"
        results = tuple(self._swap(task, rank) for rank in range(self._tp_size))
        self._on_result(TransferResult(task=task, ranks=results))

    def _swap(self, task: TransferTask, rank: int) -> RankResult:
        started, num_bytes, error = self._now(), 0, None
        device = self._devices.get(rank)
        if not self._open:
            error = "the client has stopped"
        elif device is not None:
            try:
                done = copy_task(device, task, lambda _: None)
                num_bytes = done if isinstance(done, int) else _all_of(done)
            except DeviceError as failure:
                error = f"{type(failure).__name__}: {failure}"
        elif self._layout is not None:
            error = "its KV arrays are not attached"
        return RankResult(rank=rank, num_bytes=num_bytes, seconds=self._now() - started, error=error)

    @property
    def available(self) -> bool:
        return self._open and (self._layout is None or len(self._devices) == self._tp_size)

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:  # noqa: ARG002
        return self.available

    def wait_ready(self, timeout_seconds: float) -> bool:  # noqa: ARG002 (there is nothing to wait for)
        return self.available

    def kv_views(self, rank: int) -> KVViews:
        return self._own_kv(rank).views()

    def kv_handle(self, rank: int) -> KVHandle:
        return self._own_kv(rank).handle()

    def _own_kv(self, rank: int) -> KVMemory:
        if not self._memory:
            raise LayoutError("the cache is closed, or has no layout; it has no KV arrays")
        kv = self._memory[rank].kv
        if kv is None:
            raise LayoutError(f"the KV arrays of rank {rank} are its worker's own")
        return kv

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        if self._layout is None or isinstance(kv, KVHandle):
            raise LayoutError("the inline client takes arrays of this process, and needs a layout")
        segments, places = local_segments(self._layout, kv)
        self._layout.check_places(places, [len(segment) for segment in segments], self._num_gpu_blocks)
        self._attached[rank] = kv
        self._devices[rank] = CpuDevice(self._layout, segments, places, self._images[rank], self._num_gpu_blocks)

    def kv_lost(self, rank: int) -> None:
        self._devices.pop(rank, None)
        self._attached.pop(rank, None)

    def cpu_segments(self) -> list[SharedArray]:
        return [memory.cpu for memory in self._memory]

    def release_memory(self, *, gpu: bool, cpu: bool) -> int:
        return release_pages(self._memory, gpu=gpu, cpu=cpu)

    def retake_memory(self) -> None:
        retake_pages(self._memory)

    def stop(self) -> None:
        self._open = False
        self._devices, self._images, self._attached = {}, [], {}
        for memory in self._memory:
            memory.close()
        self._memory = []  # their signal words have a descriptor of their own as long as somebody has them
