"""The calls of the CUDA driver that the device needs, with our errors. Lazy: nothing of NVIDIA's is imported before.

Source: the CUDA driver API reference (docs.nvidia.com/cuda/cuda-driver-api) and `cuda.bindings` 12.9 and 13.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any

import numpy as np

from fastdeploy_cache.errors import DeviceError

logger = logging.getLogger(__name__)

Addresses = np.ndarray[Any, np.dtype[np.uint64]]

# "The process must be terminated and relaunched", or the context is gone: driver API reference, CUresult
_LOST = {4, 214, 220, 226, 700, 702, 709, 710, 714, 715, 716, 717, 718, 719, 721, 810, 911, 999}
_MAX_BATCH = 4096  # larger batches have hung and crashed drivers in the field (vLLM issue 49276)
_NO_BATCH: tuple[int, Any] = (0, None)


class Cuda:
    """One GPU, through its primary context, which the model's framework in the same process would share.

    Each thread calls `bind_thread` first.
    """

    def __init__(self, device_id: int, *, may_batch: bool = True) -> None:
        """`may_batch`: many copies go in one call, where the driver has such a call.

        Raises:
            DeviceError: the bindings, the driver or the device are missing; the message names which.
        """
        try:
            from cuda.bindings import driver
        except ImportError as error:
            raise DeviceError(
                f"device 'cuda' needs NVIDIA's cuda-bindings ({error}); run: pip install 'cuda-bindings>=12.9.1'"
            ) from error
        self.driver = driver
        self.is_lost = False
        try:
            self.call("cuInit", 0)
        except RuntimeError as error:  # the bindings raise where there is no libcuda.so
            raise DeviceError(f"no NVIDIA driver can be loaded ({error}); install it, or use device = 'cpu'") from error
        num_devices = self.call("cuDeviceGetCount")
        if not 0 <= device_id < num_devices:
            raise DeviceError(f"no CUDA device {device_id}: the driver sees {num_devices}; see CUDA_VISIBLE_DEVICES")
        self.device = self.call("cuDeviceGet", device_id)
        self.context = self.call("cuDevicePrimaryCtxRetain", self.device)
        self.bind_thread()
        self._batch_version, self._batch = self._find_batch() if may_batch else _NO_BATCH
        if self._batch is not None:
            self._attributes: Any = driver.CUmemcpyAttributes()
            order = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
            self._attributes.srcAccessOrder = order  # "any" may read a source before the stream gets there
        self._zero = np.zeros(1, np.uint64)

    def call(self, name: str, *arguments: Any) -> Any:
        """Call the driver: its outputs, none or one or a tuple. Raises `DeviceError` with the driver's own name."""
        try:
            result, *outputs = getattr(self.driver, name)(*arguments)
        except ValueError as error:
            if "is not a valid CUresult" not in str(error):  # about an argument, or about what was read: no failure
                raise DeviceError(f"{name} failed in cuda-bindings: {error}") from error
            self.is_lost = True  # a code that is newer than the bindings: what it means for the rest is unknown
            raise DeviceError(f"{name} failed: {error}; newer cuda-bindings may know it") from error
        if int(result) != 0:
            raise self._failure(name, int(result))
        return outputs[0] if len(outputs) == 1 else tuple(outputs) or None

    def _failure(self, name: str, code: int) -> DeviceError:
        self.is_lost |= code in _LOST
        try:
            said = self.driver.CUresult(code).name
        except ValueError:
            self.is_lost, said = True, "a code that these cuda-bindings do not know"
        return DeviceError(f"{name} failed: {said} ({code})")

    def bind_thread(self) -> None:
        """Make the context the calling thread's."""
        self.call("cuCtxSetCurrent", self.context)

    def new_stream(self) -> Any:
        """A stream that waits for no other."""
        return self.call("cuStreamCreate", self.driver.CUstream_flags.CU_STREAM_NON_BLOCKING)

    def new_event(self) -> Any:
        """An event whose waiter sleeps instead of spinning."""
        flags = self.driver.CUevent_flags
        return self.call("cuEventCreate", flags.CU_EVENT_DISABLE_TIMING | flags.CU_EVENT_BLOCKING_SYNC)

    @property
    def has_batch(self) -> bool:
        """Whether many copies go in one call."""
        return self._batch is not None

    def _find_batch(self) -> tuple[int, Any]:
        """The batched copy by its address: called with arrays of addresses it costs nothing per piece."""
        found = int(self.call("cuDriverGetVersion"))
        version = 13000 if found >= 13000 else 12080 if found >= 12080 else 0
        if not version or not hasattr(self.driver, "CUmemcpyAttributes"):  # the driver is too old, or the bindings
            return _NO_BATCH
        result, address, *_ = self.driver.cuGetProcAddress(b"cuMemcpyBatchAsync", version, 0)
        if int(result) != 0 or not int(address):
            return _NO_BATCH
        void, size = ctypes.c_void_p, ctypes.c_size_t
        # CUDA 13 has dropped the index of the failing copy
        tail = [void, void] if version == 12080 else [void]
        kind = ctypes.CFUNCTYPE(ctypes.c_int, void, void, void, size, void, void, size, *tail)
        return version, kind(int(address))

    def copy_pieces(self, to: Addresses, source: Addresses, num_bytes: int, stream: Any) -> None:
        """Start copying `num_bytes` from each address of `source` to the same place of `to`; order is not kept."""
        if self._batch is None:
            for target, origin in zip(to.tolist(), source.tolist(), strict=True):
                self.call("cuMemcpyAsync", target, origin, num_bytes, stream)
            return
        sizes = np.full(min(len(to), _MAX_BATCH), num_bytes, np.uint64)
        failed = ctypes.c_size_t()
        for first in range(0, len(to), _MAX_BATCH):
            targets, origins = to[first : first + _MAX_BATCH], source[first : first + _MAX_BATCH]
            arguments: list[Any] = [targets.ctypes.data, origins.ctypes.data, sizes.ctypes.data, len(targets)]
            arguments += [self._attributes.getPtr(), self._zero.ctypes.data, 1]
            arguments += [ctypes.addressof(failed)] if self._batch_version == 12080 else []
            code = self._batch(*arguments, int(stream))
            if code:
                raise self._failure("cuMemcpyBatchAsync", code)

    def pin(self, address: int, num_bytes: int, row_bytes: int) -> list[int]:
        """Register memory with the driver, so that copies need no staging; the addresses to unregister.

        In pieces of at most 64 GiB that end between rows: larger registrations fail, and a copy may cross none.
        """
        flags = self.driver.CU_MEMHOSTREGISTER_PORTABLE | self.driver.CU_MEMHOSTREGISTER_DEVICEMAP
        unit = int(np.lcm(row_bytes, 4096))
        piece = max(unit, (64 << 30) // unit * unit)
        starts = list(range(0, num_bytes, piece))
        for start in starts:
            try:
                self.call("cuMemHostRegister", address + start, min(piece, num_bytes - start), flags)
            except DeviceError as error:
                raise DeviceError(
                    f"{num_bytes} bytes of CPU blocks cannot be pinned: {error}; give fewer blocks, or let the process "
                    "lock more memory (for a container: --ulimit memlock=-1)"
                ) from error
        return [address + start for start in starts]


def compile_for(architecture: bytes, source: bytes) -> bytes:
    """A kernel's machine code. Raises `DeviceError` where the compiler is missing or refuses the source."""
    try:
        from cuda.bindings import nvrtc

        result, program = nvrtc.nvrtcCreateProgram(source, b"copy_pieces.cu", 0, [], [])
    except (ImportError, RuntimeError) as error:
        raise DeviceError(f"no run-time compiler: {error}; pip install nvidia-cuda-nvrtc") from error
    options = [b"--gpu-architecture=" + architecture]
    (result,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if int(result) != 0:
        raise DeviceError(f"the copy kernel cannot be compiled for {architecture.decode()}: {result}")
    _, num_bytes = nvrtc.nvrtcGetCUBINSize(program)
    code = bytes(num_bytes)  # filled in place
    nvrtc.nvrtcGetCUBIN(program, code)
    nvrtc.nvrtcDestroyProgram(program)
    return code
