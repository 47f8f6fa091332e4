"""A rank's KV arrays in shared memory, and the handle by which they go from process to process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any, Literal, Self

import msgspec
import numpy as np

from fastdeploy_cache.errors import IPCError, LayoutError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.process_start import started_ticks
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout

KVViews = list[dict[str, np.ndarray[Any, np.dtype[Any]]]]


class SegmentHandle(msgspec.Struct, frozen=True, kw_only=True):
    """One piece of memory: a descriptor of a living process, or a CUDA IPC handle.

    `pid` 0 means that the reader has inherited the descriptor under that very number. Else `started` is when the
    process began (`started_ticks`): its number may be another process's by the time that the handle is read.
    """

    kind: Literal["memfd", "cuda"]
    num_bytes: int
    pid: int = 0
    started: int = 0
    fd: int = -1
    inode: int = 0  # of the memory: the number of a closed descriptor is soon another one's
    ipc_handle: bytes = b""

    @classmethod
    def of(cls, num_bytes: int, fd: int, pid: int) -> SegmentHandle:
        """The handle of a descriptor of this process, which has the number `pid`; 0: the reader inherits it."""
        started = started_ticks(pid) if pid else 0
        return cls(kind="memfd", num_bytes=num_bytes, pid=pid, started=started, fd=fd, inode=os.fstat(fd).st_ino)

    @classmethod
    def share(cls, array: SharedArray) -> bytes:
        """What `attach` takes in another process, as long as this one lives."""
        return encode(cls.of(array.num_bytes, array.fd, os.getpid()))

    @staticmethod
    def attach(handle: bytes) -> SharedArray:
        """Map what another process has shared.

        Raises:
            IPCError: it is no handle, or the owner is gone or belongs to somebody else.
        """
        segment: SegmentHandle = decode(handle, SegmentHandle)
        return SharedArray(segment.open_fd(), segment.num_bytes)

    def open_fd(self) -> int:
        """A descriptor of this process's own, for as long as the owner lives.

        Source: proc(5), /proc/PID/fd; both processes belong to the same user.

        Raises:
            IPCError: the owner is gone or belongs to somebody else.
        """
        try:
            fd = os.open(f"/proc/{self.pid or 'self'}/fd/{self.fd}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise IPCError(f"descriptor {self.fd} of process {self.pid} cannot be opened: {error.strerror}") from error
        # After opening: a process that is still the one that was meant has been so all the time.
        if self.pid and started_ticks(self.pid) != self.started:
            os.close(fd)
            raise IPCError(f"process {self.pid}, which had descriptor {self.fd}, is gone: another one has its number")
        if os.fstat(fd).st_ino != self.inode:
            os.close(fd)
            raise IPCError(f"descriptor {self.fd} of process {self.pid} is no longer that memory; ask for a new handle")
        return fd


class KVHandle(msgspec.Struct, frozen=True):
    """Where a rank's KV arrays are: hand it to another process of the same user as `to_bytes`, by any channel."""

    segments: tuple[SegmentHandle, ...]
    places: Places

    def to_bytes(self) -> bytes:
        """The handle as a message."""
        return encode(self)

    @classmethod
    def from_bytes(cls, data: bytes) -> KVHandle:
        """Raises `CodecError` for what is no handle."""
        handle: KVHandle = decode(data, KVHandle)
        return handle


class KVMemory:
    """The KV arrays of one rank on the CPU device. Whoever holds it (or a view) keeps the memory alive."""

    def __init__(
        self, layout: RankLayout, num_gpu_blocks: int, segments: Sequence[SharedArray], places: Places
    ) -> None:
        """Use `create` or `open`."""
        layout.check_places(places, [segment.num_bytes for segment in segments], num_gpu_blocks)
        self.segments = tuple(segments)
        self.places = places
        self._layout = layout

    @classmethod
    def create(cls, layout: RankLayout, num_gpu_blocks: int, name: str = "kv") -> Self:
        """New arrays of zeros, in the layout's order.

        Raises:
            NotEnoughMemoryError: they do not fit; nothing was taken.
            LayoutError: of a hybrid model, without numbers of units: give `CacheConfig.rank_layout()`.
        """
        if len(layout.num_units) < len(layout.rows) - 1:
            raise LayoutError(
                f"the layout has {len(layout.rows) - 1} rows behind the full one, and no numbers of their units; give "
                "`config.rank_layout()` instead of `layout.for_rank(...)`"
            )
        memory = SharedArray.create(name, layout.gpu_bytes(num_gpu_blocks))
        return cls(layout, num_gpu_blocks, [memory], layout.places(num_gpu_blocks))

    @classmethod
    def open(cls, layout: RankLayout, num_gpu_blocks: int, handle: KVHandle) -> Self:
        """Map the arrays of another process.

        Raises:
            IPCError: the owner is gone, or the memory is smaller than it says.
            LayoutError: the arrays do not fit the layout, or are on a GPU.
        """
        if any(segment.kind != "memfd" for segment in handle.segments):
            raise LayoutError("these KV arrays are on a GPU; the CPU device needs shared memory")
        segments: list[SharedArray] = []
        for segment in handle.segments:
            fd = segment.open_fd()
            try:
                segments.append(SharedArray(fd, segment.num_bytes))
            except BaseException:
                os.close(fd)
                raise
        return cls(layout, num_gpu_blocks, segments, handle.places)

    def handle(self) -> KVHandle:
        """A handle for other processes, good as long as this one lives and has not closed it."""
        return self._handle(os.getpid())

    def inherited(self) -> KVHandle:
        """A handle for a child process that inherits the descriptors."""
        return self._handle(0)

    def _handle(self, pid: int) -> KVHandle:
        return KVHandle(tuple([SegmentHandle.of(s.num_bytes, s.fd, pid) for s in self.segments]), self.places)

    def flat(self) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
        """Each segment as bytes."""
        return [segment.view(np.uint8, (segment.num_bytes,)) for segment in self.segments]

    def views(self) -> KVViews:
        """The arrays [blocks, *part.storage_shape] that the model reads and writes, by layer and part name."""
        return self._layout.kv_views(self.flat(), self.places)

    def close(self) -> None:
        """Give the descriptors up; views stay valid. Safe to call twice."""
        for segment in self.segments:
            segment.close()


def open_cpu_blocks(fd: int, num_blocks: int, block_bytes: int) -> SharedArray:
    """The rank's CPU blocks, which are never initialised by those who attach.

    Raises:
        IPCError: they are fewer than that.
    """
    cpu = SharedArray(fd, os.fstat(fd).st_size)
    if cpu.num_bytes < num_blocks * block_bytes:
        raise IPCError(f"the CPU blocks have {cpu.num_bytes} bytes, too few for {num_blocks} blocks")
    return cpu
