"""Section: what the device asks of the driver, one small step at a time, so that a failure has a name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.gpu.gpu_memory import Bytes, GpuMemory, expect_equal, noise
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.transfer_manager.device.copy_kernel import CopyKernel, PieceTable
from fastdeploy_cache.transfer_manager.device.cuda_driver import Addresses, Cuda

_PIECE, _NUM = 4096, 64
_SIZE = _PIECE * _NUM
_Start = Callable[[Cuda, Addresses, Addresses], None]


def run(notes: Notes, options: GpuOptions) -> None:  # noqa: ARG001
    """Memory, pinned shared memory, and each way of copying, alone and waited for."""
    cuda = Cuda(0)
    notes.check("memory of the GPU", partial(_memory, cuda))
    notes.check("shared memory is pinned", partial(_pin, cuda))
    ways: dict[str, tuple[Cuda, _Start]] = {"a call for each piece": (Cuda(0, may_batch=False), _by_calls)}
    if cuda.has_batch:
        ways["a batch"] = (cuda, _by_calls)
    ways["the kernel"] = (cuda, _by_kernel)
    for name, (through, start) in ways.items():
        notes.check(f"{name}, out and in", partial(_copy, through, start))


def _memory(cuda: Cuda) -> str:
    memory, wanted = GpuMemory(cuda, _SIZE), noise(1, _SIZE)
    expect_equal("new memory that was set to 0", memory.read(), np.zeros(_SIZE, np.uint8))
    memory.write(wanted)
    expect_equal("memory that was written", memory.read(), wanted)
    memory.close()
    return f"{_SIZE} bytes of cuMemAlloc, written and read"


def _pin(cuda: Cuda) -> str:
    shared = SharedArray.create("gpu-steps", _SIZE)
    address = shared.view(np.uint8, (_SIZE,)).ctypes.data
    (pinned,) = cuda.pin(address, _SIZE, _PIECE)
    cuda.call("cuMemHostUnregister", pinned)
    shared.close()
    return f"{_SIZE} bytes of a memfd, registered and let go"


def _copy(cuda: Cuda, start: _Start) -> str:
    """Pieces backwards from a pinned memfd to the GPU, and as they lie there to another part of the memfd."""
    shared = SharedArray.create("gpu-steps", 2 * _SIZE)
    host: Bytes = shared.view(np.uint8, (2, _NUM, _PIECE))
    memory = GpuMemory(cuda, _SIZE)
    (pinned,) = cuda.pin(host.ctypes.data, host.nbytes, _PIECE)
    host[0] = noise(2, _SIZE).reshape(_NUM, _PIECE)
    steps = np.arange(_NUM, dtype=np.uint64) * np.uint64(_PIECE)
    on_host, on_gpu = np.uint64(host.ctypes.data) + steps, np.uint64(memory.address) + steps
    start(cuda, np.ascontiguousarray(on_gpu[::-1]), on_host)
    expect_equal("on the GPU", memory.read().reshape(_NUM, _PIECE), np.ascontiguousarray(host[0, ::-1]))
    start(cuda, on_host + np.uint64(_SIZE), on_gpu)
    expect_equal("back on the host", host[1], np.ascontiguousarray(host[0, ::-1]))
    cuda.call("cuMemHostUnregister", pinned)
    memory.close()
    del host
    shared.close()
    return f"{_NUM} pieces of {_PIECE} bytes"


def _by_calls(cuda: Cuda, to: Addresses, source: Addresses) -> None:
    stream = cuda.new_stream()
    cuda.copy_pieces(to, source, _PIECE, stream)
    event = cuda.new_event()
    cuda.call("cuEventRecord", event, stream)
    cuda.call("cuEventSynchronize", event)
    cuda.call("cuEventDestroy", event)
    cuda.call("cuStreamDestroy", stream)


def _by_kernel(cuda: Cuda, to: Addresses, source: Addresses) -> None:
    kernel, stream = CopyKernel(cuda), cuda.new_stream()
    table = PieceTable(kernel)
    table.copy_pieces(to, source, _PIECE, stream)
    cuda.call("cuStreamSynchronize", stream)
    cuda.call("cuStreamDestroy", stream)
    table.close()
    kernel.close()
