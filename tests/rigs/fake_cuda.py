"""A CUDA driver on CPU memory: the calls of `cuda.bindings.driver` that the device makes, held to their rules.

Copies are done only when somebody waits for them, and only between known memory; what lies outside, or crosses a
registration, is an illegal address, which no call afterwards forgives. It shows that the device asks for the right
things in the right order, not that a driver does them.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

ILLEGAL_ADDRESS = 700


class Code(int):
    """A CUresult."""

    @property
    def name(self) -> str:
        return {0: "CUDA_SUCCESS", 2: "CUDA_ERROR_OUT_OF_MEMORY", 700: "CUDA_ERROR_ILLEGAL_ADDRESS"}.get(
            self, f"CUDA_ERROR_{int(self)}"
        )


class _Struct:
    size = 64

    def __init__(self) -> None:
        self._memory = ctypes.create_string_buffer(self.size)

    def getPtr(self) -> int:
        return ctypes.addressof(self._memory)


class _Attributes(_Struct):
    size = 24
    srcAccessOrder = 0


class FakeDriver(types.ModuleType):
    """`version`: what the driver says it is; below 12080 it has no batched copy. `fail`: calls that fail next time."""

    IS_SIMULATED = True
    CU_MEMHOSTREGISTER_PORTABLE, CU_MEMHOSTREGISTER_DEVICEMAP = 1, 2
    CUresult = Code
    CUipcMemHandle = _Struct
    CUmemcpyAttributes = _Attributes

    def __init__(self, version: int = 13000, num_devices: int = 1) -> None:
        super().__init__("cuda.bindings.driver")
        self.version, self.num_devices = version, num_devices
        self.CUstream_flags = types.SimpleNamespace(CU_STREAM_NON_BLOCKING=1)
        self.CUevent_flags = types.SimpleNamespace(CU_EVENT_DISABLE_TIMING=2, CU_EVENT_BLOCKING_SYNC=1)
        self.CUipcMem_flags = types.SimpleNamespace(CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS=1)
        self.CUmemcpySrcAccessOrder = types.SimpleNamespace(CU_MEMCPY_SRC_ACCESS_ORDER_STREAM=1)
        names = ("CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM", "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR")
        self.CUdevice_attribute = types.SimpleNamespace(**{f"CU_DEVICE_ATTRIBUTE_{name}": name for name in names})
        self.fail: dict[str, int] = {}
        self.lost = 0
        self.on_gpu: dict[int, int] = {}  # address -> bytes
        self.pinned: dict[int, int] = {}
        self.num_copies = {"cuMemcpyAsync": 0, "cuMemcpyBatchAsync": 0, "cuLaunchKernel": 0}
        self._buffers: dict[int, Any] = {}
        self._numbers = itertools.count(1)
        self._queues: dict[int, list[Callable[[], None]]] = {}
        self._events: dict[int, tuple[int, int]] = {}  # event -> stream, position
        self._done: dict[int, int] = {}
        self._batch = self._batch_function()

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if not name.startswith("cu") or not callable(found):
            return found

        def call(*arguments: Any) -> tuple[Any, ...]:
            code = self.lost or self.fail.pop(name, 0)
            outputs = (None,) if code else found(*arguments)
            return (Code(code or self.lost), *(outputs if outputs is not None else ()))

        return call

    def cuInit(self, flags: int) -> None: ...
    def cuCtxSetCurrent(self, context: object) -> None: ...

    def cuCtxSynchronize(self) -> None: ...

    def cuDeviceGetCount(self) -> tuple[int]:
        return (self.num_devices,)

    def cuDeviceGet(self, number: int) -> tuple[int]:
        return (number,)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple[str]:
        return ("context",)

    def cuDriverGetVersion(self) -> tuple[int]:
        return (self.version,)

    def cuDeviceGetAttribute(self, which: str, device: int) -> tuple[int]:
        return (1,) if which.startswith("CAN") else (9,) if which.endswith("MAJOR") else (0,)

    def cuGetProcAddress(self, name: bytes, version: int, flags: int) -> tuple[int, int]:
        assert name == b"cuMemcpyBatchAsync" and version <= self.version
        return ctypes.cast(self._batch, ctypes.c_void_p).value or 0, 0

    def cuDeviceGetName(self, length: int, device: int) -> tuple[bytes]:
        return (b"simulated GPU" + bytes(length - 13),)

    def cuDeviceGetPCIBusId(self, length: int, device: int) -> tuple[bytes]:
        return (b"ffff:ff:1f.7" + bytes(length - 12),)

    def cuDeviceTotalMem(self, device: int) -> tuple[int]:
        return (1 << 30,)

    # -- memory

    def cuMemGetInfo(self) -> tuple[int, int]:
        return (1 << 30) - sum(self.on_gpu.values()), 1 << 30

    def cuMemAlloc(self, num_bytes: int) -> tuple[int]:
        return (self._allocate(num_bytes, self.on_gpu),)

    def cuMemHostAlloc(self, num_bytes: int, flags: int) -> tuple[int]:
        return (self._allocate(num_bytes, self.pinned),)

    def _allocate(self, num_bytes: int, among: dict[int, int]) -> int:
        buffer = ctypes.create_string_buffer(num_bytes + 16)
        address = -(-ctypes.addressof(buffer) // 16) * 16
        self._buffers[address], among[address] = buffer, num_bytes
        return address

    def cuMemFree(self, address: int) -> None:
        del self.on_gpu[address], self._buffers[address]

    def cuMemFreeHost(self, address: int) -> None:
        del self.pinned[address], self._buffers[address]

    def cuMemsetD8Async(self, address: int, value: int, num_bytes: int, stream: int) -> None:
        self.cuMemsetD8(address, value, num_bytes)

    def cuMemsetD8(self, address: int, value: int, num_bytes: int) -> None:
        ctypes.memset(address, value, num_bytes)

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> None:
        self.pinned[address] = num_bytes

    def cuMemHostUnregister(self, address: int) -> None:
        del self.pinned[address]

    def cuMemGetAddressRange(self, address: int) -> tuple[int, int]:
        return next((base, size) for base, size in self.on_gpu.items() if base <= address < base + size)

    def cuIpcGetMemHandle(self, base: int) -> tuple[_Struct]:
        assert base in self.on_gpu, "a handle is of a whole allocation"
        handle = _Struct()
        ctypes.memmove(handle.getPtr(), base.to_bytes(8, "little"), 8)
        return (handle,)

    def cuIpcOpenMemHandle(self, handle: _Struct, flags: int) -> tuple[int]:
        base = int.from_bytes(ctypes.string_at(handle.getPtr(), 8), "little")
        assert base in self.on_gpu and flags == 1
        return (base,)

    def cuMemcpyHtoD(self, to: int, source: int, num_bytes: int) -> None:
        """The host's memory need not be pinned."""
        self._move(to, source, num_bytes, is_known=self._is_known(to, num_bytes))

    def cuMemcpyDtoH(self, to: int, source: int, num_bytes: int) -> None:
        self._move(to, source, num_bytes, is_known=self._is_known(source, num_bytes))

    # -- streams and events

    def cuStreamDestroy(self, stream: int) -> None:
        assert self._done[stream] == len(self._queues[stream]), "a copy is under way"
        self._queues[stream] = []
        self._done[stream] = 0

    def cuEventDestroy(self, event: int) -> None:
        del self._events[event]

    def cuStreamCreate(self, flags: int) -> tuple[int]:
        stream = len(self._queues) + 1
        self._queues[stream], self._done[stream] = [], 0
        return (stream,)

    def cuEventCreate(self, flags: int) -> tuple[int]:
        event = next(self._numbers)
        self._events[event] = (0, 0)
        return (event,)

    def cuEventRecord(self, event: int, stream: int) -> None:
        self._events[event] = (stream, len(self._queues[stream]))

    def cuEventSynchronize(self, event: int) -> None:
        self._run(*self._events[event])

    def cuStreamSynchronize(self, stream: int) -> None:
        self._run(stream, len(self._queues[stream]))

    def _run(self, stream: int, until: int) -> None:
        for position in range(self._done[stream], until):
            self._queues[stream][position]()
        self._done[stream] = max(self._done[stream], until)

    # -- copies

    def cuMemcpyAsync(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        self.num_copies["cuMemcpyAsync"] += 1
        self._queues[stream].append(lambda: self._copy(to, source, num_bytes))

    def _batch_function(self) -> Any:
        void, size = ctypes.c_void_p, ctypes.c_size_t
        tail = [void, void] if self.version < 13000 else [void]

        def batch(to: int, source: int, sizes: int, count: int, attributes: int, indices: int, *rest: int) -> int:
            assert rest[0] == 1 and ctypes.c_size_t.from_address(indices).value == 0
            self.num_copies["cuMemcpyBatchAsync"] += 1
            columns = [list((ctypes.c_uint64 * count).from_address(column)) for column in (to, source, sizes)]
            for row in zip(*columns, strict=True):
                self._queues[rest[-1]].append(lambda row=row: self._copy(*row))
            return self.lost or self.fail.pop("cuMemcpyBatchAsync", 0)

        return ctypes.CFUNCTYPE(ctypes.c_int, void, void, void, size, void, void, size, *tail)(batch)

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        is_known = self._is_known(to, num_bytes) and self._is_known(source, num_bytes)
        self._move(to, source, num_bytes, is_known=is_known)

    def _move(self, to: int, source: int, num_bytes: int, *, is_known: bool) -> None:
        if is_known:
            ctypes.memmove(to, source, num_bytes)
        else:
            self.lost = ILLEGAL_ADDRESS

    def _is_known(self, address: int, num_bytes: int) -> bool:
        ranges = (*self.on_gpu.items(), *self.pinned.items())
        return any(base <= address and address + num_bytes <= base + size for base, size in ranges)

    def cuModuleLoadData(self, code: bytes) -> tuple[str]:
        assert code == b"code for sm_90"
        return ("module",)

    def cuModuleGetFunction(self, module: str, name: bytes) -> tuple[bytes]:
        return (name,)

    def cuModuleUnload(self, module: str) -> None:
        assert module == "module"

    def cuLaunchKernel(self, function: bytes, *arguments: Any) -> None:
        *grid, stream, ((to, source, num_vectors, num_pieces), _), _ = arguments
        assert function == b"copy_pieces" and len(grid) == 7 and grid[0] >= 1
        self.num_copies["cuLaunchKernel"] += 1

        def run() -> None:  # the addresses are read when the kernel runs, as a GPU would
            for piece in range(num_pieces):
                where = (ctypes.c_uint64.from_address(column + 8 * piece).value for column in (to, source))
                self._copy(*where, 16 * num_vectors)

        self._queues[stream].append(run)


class FakeCompiler(types.ModuleType):
    """`cuda.bindings.nvrtc`."""

    def nvrtcCreateProgram(self, source: bytes, *_: object) -> tuple[int, list[bytes]]:
        assert b"copy_pieces" in source
        return 0, []

    def nvrtcCompileProgram(self, program: list[bytes], count: int, options: list[bytes]) -> tuple[int]:
        program[:] = options
        return (0,)

    def nvrtcGetCUBINSize(self, program: list[bytes]) -> tuple[int, int]:
        return 0, len(b"code for sm_90")

    def nvrtcGetCUBIN(self, program: list[bytes], into: bytes) -> tuple[int]:
        code = b"code for " + program[0].partition(b"=")[2]
        ctypes.memmove(into, code, len(code))
        return (0,)

    def nvrtcDestroyProgram(self, program: object) -> tuple[int]:
        return (0,)


def install(monkeypatch: pytest.MonkeyPatch, driver: FakeDriver | None, *, compiler: bool = False) -> None:
    """Let `cuda.bindings` be this driver, with a run-time compiler or without; None: no bindings are installed."""
    bindings = types.ModuleType("cuda.bindings")
    for name, module in (("driver", driver), ("nvrtc", FakeCompiler("nvrtc") if compiler else None)):
        monkeypatch.delitem(sys.modules, f"cuda.bindings.{name}", raising=False)
        if module is not None:
            monkeypatch.setitem(sys.modules, f"cuda.bindings.{name}", module)
            setattr(bindings, name, module)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", bindings)
