"""Section: KV arrays that this process has on the GPU, attached to a rank's process by CUDA IPC."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from fastdeploy_cache.launch.bench.cuda_transfer import cuda_config
from fastdeploy_cache.launch.bench.transfer import Ranks
from fastdeploy_cache.launch.gpu.gpu_memory import (
    Bytes,
    GpuMemory,
    array_places,
    expect_equal,
    fill_views,
    images_of,
    noise,
)
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.transfer_manager.device.cuda import export_kv
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.task import TaskKind

_NUM_GPU_BLOCKS = 64
_LAYOUTS = {
    "layer first": KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, dtype="bfloat16"),
    "block first": KVLayout(num_layers=4, num_kv_heads=4, head_dim=64, device_order="block_first"),
    "latent, FP8 with scales": KVLayout(
        num_layers=3, num_kv_heads=1, head_dim=576, value_head_dim=0, dtype="float8_e4m3", scale_dtype="float32"
    ),
}


class WorkerArrays(Protocol):
    """KV arrays of this process. `images`: [blocks, bytes of a block], as the CPU tier holds them."""

    num_blocks: int

    def handle(self) -> KVHandle:
        """What a rank attaches."""
        ...

    def write(self, images: Bytes) -> None:
        """Set all blocks, and wait until they are there."""
        ...

    def read(self) -> Bytes:
        """The images of all blocks."""
        ...


def rows_of(layers: Sequence[Mapping[str, Any]], images: Bytes) -> Iterator[tuple[Any, Bytes]]:
    """Each tensor of the layers with its bytes of these images; all tensors have as many."""
    tensors = [tensor for layer in layers for tensor in layer.values()]
    rows = np.split(images, len(tensors), axis=1)
    return zip(tensors, map(np.ascontiguousarray, rows), strict=True)


class PlainArrays:
    """`WorkerArrays` in one allocation of the driver, without any framework."""

    def __init__(self, layout: RankLayout, num_blocks: int, device_id: int = 0) -> None:
        self.num_blocks, self._layout, self._device_id = num_blocks, layout, device_id
        self._memory = GpuMemory(Cuda(device_id), layout.gpu_bytes(num_blocks))

    @property
    def bases(self) -> list[int]:
        """The address here of each of the handle's segments."""
        return [self._memory.address]

    def handle(self) -> KVHandle:
        places = array_places(self._layout, self._memory.address, self.num_blocks, self._device_id)
        return export_kv(self._layout, places, self._device_id)

    def write(self, images: Bytes) -> None:
        self._memory.cuda.bind_thread()
        flat = np.zeros(self._memory.num_bytes, np.uint8)
        fill_views(self._layout.kv_views([flat], self._layout.places(self.num_blocks)), images)
        self._memory.write(flat)

    def read(self) -> Bytes:
        self._memory.cuda.bind_thread()
        views = self._layout.kv_views([self._memory.read()], self._layout.places(self.num_blocks))
        return images_of(views, self.num_blocks)

    def close(self) -> None:
        """Free the memory; no rank may have it attached."""
        if not self._memory.cuda.is_lost:  # then only the process's end frees it, and this would hide why
            self._memory.cuda.bind_thread()
            self._memory.close()


def run(notes: Notes, options: GpuOptions) -> None:
    """Each layout: stored by a rank's process, compared, overwritten, loaded elsewhere, compared."""
    names = list(_LAYOUTS)[:1] if options.is_quick else list(_LAYOUTS)
    for name in names:
        notes.check(f"{name}, memory of cuMemAlloc", partial(_check_plain, _LAYOUTS[name].for_rank(1, 16)))


def _check_plain(layout: RankLayout) -> str:
    arrays = PlainArrays(layout, _NUM_GPU_BLOCKS)
    try:
        return there_and_back(layout, arrays)
    finally:
        arrays.close()


def there_and_back(layout: RankLayout, arrays: WorkerArrays) -> str:
    """Store half of the blocks, scattered, and load them into other blocks, by a rank in a process of its own.

    Raises:
        LaunchError: bytes differ.
        RankStartError: the rank cannot attach the arrays.
        DeviceError: the driver refuses to share them.
        RuntimeError: a copy failed.
    """
    num_blocks, rng = arrays.num_blocks, np.random.default_rng(3)
    num_cpu_blocks = num_blocks + num_blocks // 2  # more than are stored, so that some ids are left out
    gpu_ids, targets = (rng.permutation(num_blocks)[: num_blocks // 2].tolist() for _ in range(2))
    cpu_ids = rng.permutation(num_cpu_blocks)[: len(gpu_ids)].tolist()
    wanted = noise(4, num_blocks * layout.block_bytes).reshape(num_blocks, -1)
    with Ranks(1, layout, num_blocks, num_cpu_blocks, cuda_config(1, "worker")) as ranks:
        handle = arrays.handle()
        ranks.client.attach_kv(0, handle)
        arrays.write(wanted)
        expect_equal("the arrays as they were written", arrays.read(), wanted)
        ranks.run(TaskKind.SWAP_OUT, gpu_ids, cpu_ids)
        images = ranks.client.cpu_segments()[0].view(np.uint8, (num_cpu_blocks, layout.block_bytes))
        expect_equal("CPU blocks after the store", images[cpu_ids], wanted[gpu_ids])
        arrays.write(np.zeros_like(wanted))
        ranks.run(TaskKind.SWAP_IN, targets, cpu_ids)
        expected = np.zeros_like(wanted)
        expected[targets] = wanted[gpu_ids]
        expect_equal("the arrays after the load", arrays.read(), expected)
        del images
    num_bytes = len(gpu_ids) * layout.block_bytes
    return f"{num_bytes} bytes out and in, {len(handle.segments)} allocations shared"
