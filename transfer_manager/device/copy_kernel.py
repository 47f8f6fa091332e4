"""A kernel that gathers and scatters many small pieces, which the copy engines take one by one.

Source: the CUDA driver API reference and NVRTC's (docs.nvidia.com/cuda), and measurements on an H100 (docs/gpu.md).
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from fastdeploy_cache.errors import DeviceError
from fastdeploy_cache.transfer_manager.device.cuda_driver import Addresses, Cuda, compile_for

# All vectors of all pieces are dealt out to all threads, so that small pieces leave no thread idle. Each thread asks
# for several vectors before it writes one: the link is slow to answer, and what is on its way at once decides the
# speed. 32-bit numbers: a 64-bit division is a call on a GPU, and would make the loads wait for each other.
_SOURCE = rb"""
#define AHEAD 4
extern "C" __global__ void copy_pieces(const unsigned long long* __restrict__ to,
                                       const unsigned long long* __restrict__ from,
                                       unsigned int num_vectors, unsigned int num_pieces) {
  const unsigned int num_all = num_vectors * num_pieces, step = gridDim.x * blockDim.x;
  for (unsigned int first = blockIdx.x * blockDim.x + threadIdx.x; first < num_all; first += AHEAD * step) {
    uint4 held[AHEAD];
    uint4* target[AHEAD];
#pragma unroll
    for (unsigned int i = 0; i < AHEAD; ++i) {
      const unsigned int at = first + i * step;
      if (at < num_all) {
        const unsigned int piece = at / num_vectors, vector = at - piece * num_vectors;
        target[i] = reinterpret_cast<uint4*>(to[piece]) + vector;
        held[i] = reinterpret_cast<const uint4*>(from[piece])[vector];
      }
    }
#pragma unroll
    for (unsigned int i = 0; i < AHEAD; ++i)
      if (first + i * step < num_all) *target[i] = held[i];
  }
}
"""
# Few, so that the model keeps its multiprocessors: on an H100, 24 blocks slow a matrix product beside them by 3 to 6 %,
# and 64 blocks by 31 %, which would be faster by a fifth (docs/gpu.md).
_NUM_BLOCKS, _NUM_THREADS = 24, 256
_MOST_VECTORS = 2**31  # of a launch, so that no number of the kernel is too large
KERNEL_ALIGNMENT = 16
TABLE_PIECES = 32768  # whose addresses the kernel reads from pinned memory


class CopyKernel:
    """The kernel, compiled for the GPU at hand."""

    def __init__(self, cuda: Cuda) -> None:
        """Raises `DeviceError` where NVRTC is missing or the GPU cannot reach pinned memory by its host address."""
        attribute = cuda.driver.CUdevice_attribute
        by_host = attribute.CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM
        if not cuda.call("cuDeviceGetAttribute", by_host, cuda.device):
            raise DeviceError("this GPU has no host addresses for registered memory")
        major, minor = (
            cuda.call("cuDeviceGetAttribute", which, cuda.device)
            for which in (
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        self.cuda = cuda
        self._module = cuda.call("cuModuleLoadData", compile_for(f"sm_{major}{minor}".encode(), _SOURCE))
        self._function = cuda.call("cuModuleGetFunction", self._module, b"copy_pieces")

    def close(self) -> None:
        """Unload the kernel; no launch of it may run."""
        self.cuda.call("cuModuleUnload", self._module)

    def launch(self, to: Addresses, source: Addresses, num_bytes: int, stream: Any) -> None:
        """Start copying `num_bytes`, a multiple of 16, from each address of `source` to the same place of `to`.

        Both arrays are in pinned memory, and stay as they are until the kernel has run.
        """
        num_vectors = num_bytes // KERNEL_ALIGNMENT
        values = (to.ctypes.data, source.ctypes.data, num_vectors, len(to))
        types = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        num_blocks = min(-(-len(to) * num_vectors // _NUM_THREADS), _NUM_BLOCKS)
        grid, block = (num_blocks, 1, 1), (_NUM_THREADS, 1, 1)
        self.cuda.call("cuLaunchKernel", self._function, *grid, *block, 0, stream, (values, types), 0)


class PieceTable:
    """Pinned room for the addresses of the pieces of one stream's launches. One thread uses it at a time."""

    def __init__(self, kernel: CopyKernel) -> None:
        """Raises `DeviceError` where no memory can be pinned."""
        self._kernel, self._cuda, self._num_used = kernel, kernel.cuda, 0
        self._address = int(self._cuda.call("cuMemHostAlloc", 16 * TABLE_PIECES, 3))  # portable, mapped
        flat = (ctypes.c_uint64 * (2 * TABLE_PIECES)).from_address(self._address)
        self._rows: Addresses = np.ctypeslib.as_array(flat).reshape(2, TABLE_PIECES)

    def copy_pieces(self, to: Addresses, source: Addresses, num_bytes: int, stream: Any) -> None:
        """Start copying `num_bytes` from each address of `source` to the same place of `to`; order is not kept."""
        most = min(TABLE_PIECES, max(1, _MOST_VECTORS * KERNEL_ALIGNMENT // num_bytes))
        for first in range(0, len(to), most):
            targets, origins = to[first : first + most], source[first : first + most]
            if self._num_used + len(targets) > TABLE_PIECES:
                # A kernel reads its addresses while it runs. If they were overwritten before, it would copy to places
                # of a later launch; so the table is filled anew only when every launch before has ended.
                self._cuda.call("cuStreamSynchronize", stream)
                self._num_used = 0
            rows = self._rows[:, self._num_used : self._num_used + len(targets)]
            rows[0], rows[1] = targets, origins
            self._num_used += len(targets)
            self._kernel.launch(rows[0], rows[1], num_bytes, stream)

    def close(self) -> None:
        """Give the memory back; no launch may run."""
        self._cuda.call("cuMemFreeHost", self._address)
