"""The simulated CUDA driver for whole programs: each of their processes has one, and CUDA IPC works between them."""

from __future__ import annotations

import ctypes
import mmap
import os
from pathlib import Path
from typing import Any

from tests.rigs.fake_cuda import FakeDriver

_DRIVER = """
import sys

from tests.rigs.fake_cuda_processes import {driver}

sys.modules[__name__] = {driver}({version})
"""
_COMPILER = """
import sys

from tests.rigs.fake_cuda import FakeCompiler

sys.modules[__name__] = FakeCompiler("cuda.bindings.nvrtc")
"""


class SharedDriver(FakeDriver):
    """Memory of the GPU is a nameless file of the process that has it; an IPC handle says which file of whom."""

    def __init__(self, version: int = 13000, num_devices: int = 1) -> None:
        super().__init__(version, num_devices)
        self._files: dict[int, tuple[int, mmap.mmap]] = {}

    def cuMemAlloc(self, num_bytes: int) -> tuple[int]:
        fd = os.memfd_create("simulated-gpu")
        os.ftruncate(fd, num_bytes)
        return (self._map(fd, num_bytes),)

    def _map(self, fd: int, num_bytes: int) -> int:
        mapped = mmap.mmap(fd, num_bytes)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        self._files[address], self.on_gpu[address] = (fd, mapped), num_bytes
        return address

    def cuMemFree(self, address: int) -> None:
        fd, _ = self._files.pop(address)
        del self.on_gpu[address]
        os.close(fd)

    def cuIpcGetMemHandle(self, base: int) -> tuple[Any]:
        handle = self.CUipcMemHandle()
        words = (ctypes.c_int64 * 3).from_address(handle.getPtr())
        words[:] = (os.getpid(), self._files[int(base)][0], self.on_gpu[int(base)])
        return (handle,)

    def cuIpcOpenMemHandle(self, handle: Any, flags: int) -> tuple[int]:
        pid, number, num_bytes = (ctypes.c_int64 * 3).from_address(handle.getPtr())
        assert flags == 1 and pid != os.getpid(), "a process cannot open its own handle"
        return (self._map(os.open(f"/proc/{pid}/fd/{number}", os.O_RDWR | os.O_CLOEXEC), num_bytes),)


class WrongDriver(SharedDriver):
    """Of each copy to or from pinned memory the last byte is another one."""

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        super()._copy(to, source, num_bytes)
        last = ctypes.c_uint8.from_address(to + num_bytes - 1)
        last.value ^= 1


class NoDriver(SharedDriver):
    """The bindings are here, and no driver is, as NVIDIA's own say it."""

    def cuInit(self, flags: int) -> None:
        raise RuntimeError("libcuda.so.1 cannot be found")


def write_bindings(folder: Path, driver: str = "SharedDriver", version: int = 13000) -> Path:
    """A package `cuda.bindings` of this driver; a process that has the folder first in PYTHONPATH takes it for real."""
    bindings = folder / "cuda" / "bindings"
    bindings.mkdir(parents=True)
    for package in (bindings.parent, bindings):
        (package / "__init__.py").write_text("")
    (bindings / "driver.py").write_text(_DRIVER.format(driver=driver, version=version))
    (bindings / "nvrtc.py").write_text(_COMPILER)
    return folder
