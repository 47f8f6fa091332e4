"""Anonymous shared memory that is handed over as a file descriptor.

The kernel frees it with its last user, however that one ends: there is no name to unlink and nothing for Python's
resource tracker to know.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.errors import IPCError, NotEnoughMemoryError
from fastdeploy_cache.ipc.huge_pages import map_shared, take_huge_pages
from fastdeploy_cache.ipc.memory_limit import check_available

_MADV_POPULATE_WRITE = 23  # Linux 5.14; asm-generic/mman-common.h


class SharedArray:
    """A memory segment shared between processes, seen through NumPy views.

    Views keep the mapping alive: `close` gives up the descriptor and this object's own hold on the mapping, and the
    memory goes when the last view does, so no view can dangle. The descriptor is inheritable by name only
    (`subprocess.Popen(pass_fds=...)`). Any thread may use it; who writes what is the users' agreement.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        """Map `num_bytes` of the segment behind `fd`, which this object owns from now on.

        Raises:
            IPCError: the segment is smaller than `num_bytes`.
        """
        actual_bytes = os.fstat(fd).st_size
        if actual_bytes < num_bytes:
            raise IPCError(f"shared segment has {actual_bytes} bytes, {num_bytes} expected; was it created elsewhere?")
        self.num_bytes = num_bytes
        self.is_released = False
        self._map: mmap.mmap | None
        self._map, self._start = map_shared(fd, num_bytes) if actual_bytes else (None, 0)
        self._fd = fd

    @classmethod
    def create(cls, name: str, num_bytes: int) -> SharedArray:
        """A new segment of zeros, every page already backed by memory (so no later touch can fail).

        `name` shows in /proc/PID/maps and is not unique. Raises `NotEnoughMemoryError` before anything is taken.
        """
        check_available(num_bytes, f"shared segment {name!r}")
        fd = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.ftruncate(fd, num_bytes)
            array = cls(fd, num_bytes)
        except BaseException:
            os.close(fd)
            raise
        try:
            array._back(name)
        except BaseException:
            array.close()
            raise
        return array

    def _back(self, name: str) -> None:
        """Give every byte its memory, and enter it into this process's page table."""
        if self._map is None:
            return
        try:
            take_huge_pages(self._fd, self._map, self._start, self.num_bytes)
            os.posix_fallocate(self._fd, 0, self.num_bytes)
        except OSError as error:
            self._map.madvise(mmap.MADV_REMOVE, self._start, self.num_bytes)  # the huge pages that there were
            what = f"shared segment {name!r} of {self.num_bytes} bytes"
            raise NotEnoughMemoryError(f"{what}: {error.strerror}") from error
        self.prefault()

    def prefault(self) -> None:
        """Enter every page into this process's page table now instead of at first touch."""
        if self._map is not None:
            with contextlib.suppress(OSError):  # an older kernel: pages are entered at first touch, only slower
                self._map.madvise(_MADV_POPULATE_WRITE, self._start, self.num_bytes)

    def release(self) -> int:
        """Give its pages back to the system and return the bytes; every mapping, in any process, reads zeros then."""
        if self._map is None or self.is_released:
            return 0
        self._map.madvise(mmap.MADV_REMOVE, self._start, self.num_bytes)
        self.is_released = True
        return self.num_bytes

    def retake(self) -> None:
        """Reserve pages again, so that no touch can fail; raises `NotEnoughMemoryError`."""
        if self._map is not None and self.is_released:
            self._back("released earlier")
            self.is_released = False

    @property
    def fd(self) -> int:
        """Descriptor to hand over; -1 once closed."""
        return self._fd

    def view(self, dtype: Any, shape: Sequence[int], offset_bytes: int = 0) -> np.ndarray[Any, np.dtype[Any]]:
        """A writable C-contiguous array of `shape` over the segment's bytes from `offset_bytes` on."""
        if self._map is None:
            raise IPCError("shared segment is closed or empty; take views before closing it")
        count = int(np.prod(shape, dtype=np.int64))
        own = memoryview(self._map)[self._start : self._start + self.num_bytes]
        return np.frombuffer(own, dtype=dtype, count=count, offset=offset_bytes).reshape(shape)

    def __del__(self) -> None:
        if hasattr(self, "_fd"):  # not so when the constructor refused
            self.close()

    def close(self) -> None:
        """Give up the descriptor and the mapping; outstanding views stay valid. Safe to call twice."""
        fd, self._fd = self._fd, -1  # first taken, then closed: of two threads only one closes it
        if fd >= 0:
            os.close(fd)
        self._map = None
