"""What ranks reach on GPUs: swaps beside plain copies of pinned memory, and the device's ways beside each other."""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self

import numpy as np

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.bench.transfer import WAYS, Case, Ranks
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.device.cuda import CudaDevice, KernelUse
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.task import TaskKind

_BY: dict[str, tuple[bool, KernelUse]] = {  # whether copies go in batches, and what goes by the kernel
    "single copies": (False, "never"),
    "batch": (True, "never"),
    "kernel": (True, "always"),
}
_START_SECONDS = 60.0  # a driver that makes a context for the first time may take half of that


def cuda_config(num_ranks: int, kv_owner: Literal["worker", "transfer"] = "transfer") -> TransferConfig:
    """Ranks on this machine's GPUs in turn, several on one where there are fewer.

    Raises:
        DeviceError: there is no GPU here, or the bindings are missing.
    """
    num_gpus = int(Cuda(0).call("cuDeviceGetCount"))
    device_ids = tuple(rank % num_gpus for rank in range(num_ranks))
    return TransferConfig(
        tp_size=num_ranks,
        device="cuda",
        device_ids=device_ids,
        kv_owner=kv_owner,
        start_timeout_seconds=_START_SECONDS,
        max_restarts=50,
    )


class PinnedCopies:
    """One piece of pinned memory and one of a GPU for each rank, and a stream to copy between them."""

    def __init__(self, device_ids: Sequence[int], num_bytes: int) -> None:
        """Raises `DeviceError` where there is no such GPU, or too little memory."""
        self._all: list[tuple[Cuda, int, int, Any]] = []
        for device_id in device_ids:
            cuda = Cuda(device_id)
            host, on_gpu = (
                int(cuda.call(*call)) for call in (("cuMemHostAlloc", num_bytes, 1), ("cuMemAlloc", num_bytes))
            )
            self._all.append((cuda, host, on_gpu, cuda.new_stream()))

    def run(self, num_bytes: int, *, to_gpu: bool) -> float:
        """Seconds until so many bytes have been copied for each rank, all at the same time."""
        started = time.perf_counter()
        for cuda, host, on_gpu, stream in self._all:
            cuda.bind_thread()
            ends = (on_gpu, host) if to_gpu else (host, on_gpu)
            cuda.call("cuMemcpyAsync", *ends, num_bytes, stream)
        for cuda, _, _, stream in self._all:
            cuda.bind_thread()
            cuda.call("cuStreamSynchronize", stream)
        return time.perf_counter() - started

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for cuda, host, on_gpu, stream in self._all:
            cuda.bind_thread()
            cuda.call("cuStreamDestroy", stream)
            cuda.call("cuMemFreeHost", host)
            cuda.call("cuMemFree", on_gpu)


class CudaBandwidth(NamedTuple):
    """Medians; bytes per second of all ranks together. `joined`: of neighbours, as the pool has most of them."""

    num_blocks: int
    start_seconds: float
    pinned_out: float
    pinned_in: float
    swap_out: float
    swap_in: float
    joined_out: float
    joined_in: float


def cuda_bandwidth(case: Case, num_ranks: int, memory_bytes: int, repeats: int) -> CudaBandwidth:
    """Swaps of half a pool, scattered and neighbouring, beside as many bytes in one pinned copy for each rank.

    Raises:
        DeviceError: no GPU, or too little memory.
        RankStartError: the ranks do not start.
        RuntimeError: a swap failed.
    """
    layout = case.layout.for_rank(1, case.block_size)  # each rank has a share of that size
    heads = case.layout.num_kv_heads * (1 if case.layout.value_head_dim == 0 else num_ranks)
    whole = dataclasses.replace(case.layout, num_kv_heads=heads).for_rank(num_ranks, case.block_size)
    num_pool = max(2, memory_bytes // layout.block_bytes)
    num_blocks = max(1, num_pool // 2)
    config = cuda_config(num_ranks)
    num_bytes = num_blocks * layout.block_bytes
    with (
        PinnedCopies(config.device_ids, num_bytes) as pinned,
        Ranks(num_ranks, whole, num_pool, num_pool, config) as ranks,
    ):

        def plainly() -> list[float]:
            return [pinned.run(num_bytes, to_gpu=kind is TaskKind.SWAP_IN) for kind in WAYS]

        seconds, start_seconds = ranks.rounds(num_pool, num_blocks, repeats, plainly), ranks.start_seconds
    speeds = [num_ranks * num_bytes / each for each in seconds]
    return CudaBandwidth(num_blocks, start_seconds, *speeds)


def way_speeds(case: Case, memory_bytes: int, repeats: int) -> dict[str, list[float]]:
    """Bytes per second out of the GPU and into it, by each way of the device, in this process, of scattered blocks.

    Raises:
        DeviceError: no GPU, or too little memory.
    """
    layout = case.layout.for_rank(1, case.block_size)
    num_pool = max(2, memory_bytes // layout.block_bytes)
    num_blocks, rng, cuda = num_pool // 2, np.random.default_rng(2), Cuda(0)
    ids = [rng.permutation(num_pool)[:num_blocks].astype(np.int32) for _ in range(2)]
    speeds = {}
    with contextlib.ExitStack() as held:
        images = SharedArray.create("bench-ways", num_pool * layout.block_bytes)
        held.callback(images.close)
        on_gpu = int(cuda.call("cuMemAlloc", layout.gpu_bytes(num_pool)))
        held.callback(cuda.call, "cuMemFree", on_gpu)
        view = images.view(np.uint8, (num_pool, layout.block_bytes))
        for name, (may_batch, use) in _BY.items():
            device = CudaDevice(
                layout,
                Cuda(0, may_batch=may_batch),
                bases=[on_gpu],
                places=layout.places(num_pool),
                images=view,
                num_gpu_blocks=num_pool,
                kernel=use,
            )
            rounds = [[_seconds(device, kind, *ids) for kind in WAYS] for _ in range(repeats + 1)]
            device.close()
            medians = [statistics.median(column) for column in zip(*rounds[1:], strict=True)]
            speeds[name] = [num_blocks * layout.block_bytes / seconds for seconds in medians]
    return speeds


def _seconds(device: CudaDevice, kind: TaskKind, sources: Any, destinations: Any) -> float:
    started = time.perf_counter()
    device.copy(kind, sources, destinations, lambda _: None)
    return time.perf_counter() - started
