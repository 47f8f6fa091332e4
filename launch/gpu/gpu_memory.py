"""Memory of a GPU that this process has, read and written as bytes from the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVViews
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class GpuMemory:
    """An allocation of `cuMemAlloc`, zeroed. The thread that uses it has the GPU's context."""

    def __init__(self, cuda: Cuda, num_bytes: int) -> None:
        """Raises `DeviceError` where the GPU has not so much left."""
        self.cuda, self.num_bytes = cuda, num_bytes
        self.address = int(cuda.call("cuMemAlloc", num_bytes))
        self.clear()

    def clear(self) -> None:
        """Set every byte to 0."""
        self.cuda.call("cuMemsetD8", self.address, 0, self.num_bytes)
        self.cuda.call("cuCtxSynchronize")

    def write(self, data: Bytes) -> None:
        """Set all bytes to `data`, contiguous and as long as the memory; they are there when this returns.

        A copy from pageable memory returns when its source may be reused, which is before it has ended.
        """
        write_gpu(self.cuda, self.address, data)

    def read(self) -> Bytes:
        """A copy of all bytes."""
        return read_gpu(self.cuda, self.address, self.num_bytes)

    def close(self) -> None:
        """Free it."""
        self.cuda.call("cuMemFree", self.address)


def write_gpu(cuda: Cuda, address: int, data: Bytes) -> None:
    """Copy contiguous host bytes to an address of the GPU, and wait until they are there."""
    cuda.call("cuMemcpyHtoD", address, data.ctypes.data, data.nbytes)
    cuda.call("cuCtxSynchronize")


def read_gpu(cuda: Cuda, address: int, num_bytes: int) -> Bytes:
    """A copy of so many bytes from an address of the GPU on."""
    data = np.empty(num_bytes, np.uint8)
    cuda.call("cuMemcpyDtoH", data.ctypes.data, address, num_bytes)
    return data


def array_places(layout: RankLayout, address: int, num_gpu_blocks: int, device_id: int) -> list[dict[str, ArrayPlace]]:
    """The arrays of a layout in one piece of GPU memory, as a worker would hand them over: by layer and part."""
    return [
        {
            part.name: ArrayPlace(
                address=address + place.offset_bytes,
                shape=(place.num_blocks, part.num_bytes),
                strides_bytes=(place.stride_bytes, 1),
                item_bytes=1,
                device="cuda",
                device_id=device_id,
            )
            for part, place in zip(layout.parts, in_layer, strict=True)
        }
        for in_layer in layout.places(num_gpu_blocks)
    ]


def expect_equal(what: str, found: Bytes, wanted: Bytes) -> None:
    """Raise `LaunchError` that says how many bytes differ, and which is the first."""
    if found.shape != wanted.shape:
        raise LaunchError(f"{what}: {found.shape} bytes, expected {wanted.shape}")
    wrong = np.flatnonzero(found.reshape(-1) != wanted.reshape(-1))
    if len(wrong):
        first = int(wrong[0])
        values = int(found.reshape(-1)[first]), int(wanted.reshape(-1)[first])
        raise LaunchError(
            f"{what}: {len(wrong)} of {found.size} bytes differ, the first at {first}: {values[0]}, not {values[1]}"
        )


def noise(seed: int, num_bytes: int) -> Bytes:
    """The same random bytes for the same seed."""
    return np.random.default_rng(seed).integers(0, 256, num_bytes, dtype=np.uint8)


def images_of(views: KVViews, num_blocks: int) -> Bytes:
    """What the CPU tier would hold of each block: [num_blocks, bytes of a block], layer by layer, part by part."""
    parts = [array for layer in views for array in layer.values()]
    rows = [np.ascontiguousarray(array[:num_blocks]).reshape(num_blocks, -1).view(np.uint8) for array in parts]
    return np.concatenate(rows, axis=1)


def fill_views(views: KVViews, images: Bytes) -> None:
    """The reverse of `images_of`: the arrays' first blocks get the bytes of these images."""
    start = 0
    for layer in views:
        for array in layer.values():
            num_bytes = array[0].nbytes
            row = np.ascontiguousarray(images[:, start : start + num_bytes])
            array[: len(images)] = row.view(array.dtype).reshape(len(images), *array.shape[1:])
            start += num_bytes
