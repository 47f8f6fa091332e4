"""KV arrays on an NVIDIA GPU, CPU blocks pinned: copied by its copy engines, or by a kernel where pieces are small."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import numpy as np

from fastdeploy_cache.errors import DeviceError, LayoutError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.device.base import DeviceSetup, check_ids, check_unit_ids, wiped_bytes
from fastdeploy_cache.transfer_manager.device.copy_kernel import KERNEL_ALIGNMENT, CopyKernel, PieceTable
from fastdeploy_cache.transfer_manager.device.cuda_driver import Addresses, Cuda
from fastdeploy_cache.transfer_manager.device.images import CheckpointImage, ImageMap, ImageMove, ImageStep
from fastdeploy_cache.transfer_manager.device.strips import Strip, leading_strips, load_steps, whole_step
from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, SegmentHandle
from fastdeploy_cache.transfer_manager.kv.parts import KVPart
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace, placed
from fastdeploy_cache.transfer_manager.task import Lane, TaskKind

logger = logging.getLogger(__name__)

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
KernelUse = Literal["measured", "always", "never"]
_IPC_HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
_MEASURED_PIECES, _MEASURED_BYTES = 256, 16 * 2**20
_WORTH = 1.25  # times the speed of the copy engines, which take nothing from the model; the kernel does


def _addresses(
    first: int, ids: Int32Array, block_stride_bytes: int, shape: Sequence[int], strides: Sequence[int]
) -> Addresses:
    """Where the rows of these blocks begin, block by block; the last of `shape` is that of a row."""
    found = np.uint64(first) + ids.astype(np.uint64) * np.uint64(block_stride_bytes)
    for num, stride in zip(shape[:-1], strides, strict=False):
        found = np.add.outer(found, np.arange(num, dtype=np.uint64) * np.uint64(stride))
    return found.reshape(-1)


class CudaDevice:
    """See `transfer_manager.device.base.Device`. One stream for each lane.

    The engine commits a block when the step that wrote it has ended on the GPU, so a copy waits for no stream of the
    model. What is loaded is visible to kernels that are launched after the event of its layer.
    """

    def __init__(
        self,
        layout: RankLayout,
        cuda: Cuda,
        *,
        bases: Sequence[int],
        places: Places,
        images: Bytes,
        num_gpu_blocks: int,
        kernel: KernelUse = "measured",
    ) -> None:
        """`bases` are the addresses of the KV memory's segments on the GPU.

        `kernel`: whether pieces go by the kernel. `always` stands for all that the kernel can copy.
        """
        self._layout, self._cuda, self._bases, self._places = layout, cuda, tuple(bases), places
        self._images, self._num_gpu_blocks = images, num_gpu_blocks
        self._load, self._store = load_steps(layout, places), whole_step(layout, places)
        self._map = ImageMap(layout, places, len(images))
        self._pinned = cuda.pin(images.ctypes.data, images.nbytes, layout.block_bytes) if images.nbytes else []
        self._streams = {lane: cuda.new_stream() for lane in Lane}
        self._events = {lane: [cuda.new_event() for _ in self._load] for lane in Lane}
        self._kernel = _kernel_or_none(cuda) if kernel != "never" else None
        self._tables = {lane: PieceTable(self._kernel) for lane in Lane} if self._kernel is not None else {}
        sizes = {strip.row_bytes for step in (*self._load, *self._store) for strip in step.strips}
        sizes |= {part.num_bytes for each in layout.layers if each.row for part in each.parts}
        self._by_kernel = {size for size in sizes if self._goes_by_kernel(size, kernel)}

    @property
    def kernel_piece_bytes(self) -> frozenset[int]:
        """Sizes of pieces that go by the kernel; the others go by the copy engines."""
        return frozenset(self._by_kernel)

    def copy(
        self,
        kind: TaskKind,
        source_ids: Int32Array,
        destination_ids: Int32Array,
        on_layer: Callable[[int], None],
        num_tokens: int | None = None,
    ) -> int:
        check_ids(kind, source_ids, destination_ids, self._num_gpu_blocks, len(self._images))
        with self._quiet_at_failure(kind.lane):
            if kind is TaskKind.COPY:
                num_bytes = self._copy_leading(source_ids, destination_ids, num_tokens)
                on_layer(self._layout.num_layers)
                return len(source_ids) * num_bytes
            self._swap(kind, source_ids, destination_ids, on_layer)
        return len(source_ids) * self._layout.block_bytes

    def copy_units(
        self, row: int, source_ids: Int32Array, destination_ids: Int32Array, num_tokens: int | None = None
    ) -> int:
        check_unit_ids(self._layout, row, source_ids, destination_ids)
        with self._quiet_at_failure(Lane.IN):
            return len(source_ids) * self._copy_leading(source_ids, destination_ids, num_tokens, row)

    def wipe(self, gpu_ids: Int32Array, cpu_ids: Int32Array, row: int = 0) -> int:
        num_blocks, stream = (self._num_gpu_blocks, len(self._images)), self._streams[Lane.OUT]
        num_bytes = wiped_bytes(self._layout, row, gpu_ids, cpu_ids, num_blocks)
        with self._quiet_at_failure(Lane.OUT):
            for strip in leading_strips(self._layout, self._places, None, row):
                for address in self._on_gpu(strip, gpu_ids).tolist():
                    self._cuda.call("cuMemsetD8Async", address, 0, strip.row_bytes, stream)
            self._images[cpu_ids] = 0
            self._cuda.call("cuStreamSynchronize", stream)
        return num_bytes

    def move_image(self, kind: TaskKind, image: CheckpointImage, on_layer: Callable[[int], None]) -> ImageMove:
        steps, event = self._map.steps(kind, image), self._events[kind.lane][0]
        if kind is TaskKind.SWAP_OUT:
            self._images.reshape(-1)[self._map.rest(image)] = 0
        for step in steps:
            with self._quiet_at_failure(kind.lane):
                for on_gpu, in_pages, num_bytes in self._addresses_of(step):
                    to, source = (on_gpu, in_pages) if kind is TaskKind.SWAP_IN else (in_pages, on_gpu)
                    self._start(kind.lane, to, source, num_bytes)
                self._cuda.call("cuEventRecord", event, self._streams[kind.lane])
                self._cuda.call("cuEventSynchronize", event)
            on_layer(step.num_layers)
            if step is not steps[-1]:
                yield
        return self._map.num_bytes(image)

    def _addresses_of(self, step: ImageStep) -> Iterator[tuple[Addresses, Addresses, int]]:
        """Where its pieces are on the GPU and in the pages, those of one size together."""
        pieces, bases = step.pieces, np.array(self._bases, np.uint64)
        on_gpu = bases[pieces.segments] + pieces.device_bytes.astype(np.uint64)
        in_pages = np.uint64(self._images.ctypes.data) + pieces.memory_bytes.astype(np.uint64)
        for size in np.unique(pieces.num_bytes).tolist():
            those = pieces.num_bytes == size
            yield on_gpu[those], in_pages[those], size

    @contextlib.contextmanager
    def _quiet_at_failure(self, lane: Lane) -> Iterator[None]:
        """What was started may still be writing: only when it has ended may the blocks be given out again."""
        try:
            yield
        except BaseException:
            if not self._cuda.is_lost:
                self._cuda.call("cuStreamSynchronize", self._streams[lane])
            raise

    def _swap(
        self, kind: TaskKind, source_ids: Int32Array, destination_ids: Int32Array, on_layer: Callable[[int], None]
    ) -> None:
        lane = kind.lane
        steps = self._load if kind is TaskKind.SWAP_IN else self._store
        gpu_ids, cpu_ids = (destination_ids, source_ids) if kind is TaskKind.SWAP_IN else (source_ids, destination_ids)
        for step, event in zip(steps, self._events[lane], strict=False):
            for strip in step.strips:
                on_gpu, in_image = self._on_gpu(strip, gpu_ids), self._in_images(strip, cpu_ids)
                to, source = (on_gpu, in_image) if kind is TaskKind.SWAP_IN else (in_image, on_gpu)
                self._start(lane, to, source, strip.row_bytes)
            self._cuda.call("cuEventRecord", event, self._streams[lane])
        for step, event in zip(steps, self._events[lane], strict=False):
            self._cuda.call("cuEventSynchronize", event)
            on_layer(step.num_layers)

    def _on_gpu(self, strip: Strip, ids: Int32Array) -> Addresses:
        """Addresses of every row of every block."""
        first = self._bases[strip.segment] + strip.offset_bytes
        return _addresses(first, ids, strip.block_stride_bytes, strip.shape, strip.strides)

    def _in_images(self, strip: Strip, ids: Int32Array) -> Addresses:
        first = self._images.ctypes.data + strip.image_offset_bytes
        return _addresses(first, ids, self._layout.block_bytes, strip.shape, strip.image_strides)

    def _start(self, lane: Lane, to: Addresses, source: Addresses, num_bytes: int) -> None:
        by_kernel = num_bytes in self._by_kernel and not _misaligned(to, source)
        copier = self._tables[lane] if by_kernel else self._cuda
        copier.copy_pieces(to, source, num_bytes, self._streams[lane])

    def _copy_leading(self, sources: Int32Array, destinations: Int32Array, num_tokens: int | None, row: int = 0) -> int:
        """Copy whole blocks, or their first tokens, within the GPU. Returns the bytes of one block that were copied."""
        moved, stream = 0, self._streams[Lane.IN]
        for strip in leading_strips(self._layout, self._places, num_tokens, row):
            to, source = self._on_gpu(strip, destinations), self._on_gpu(strip, sources)
            self._cuda.copy_pieces(to, source, strip.row_bytes, stream)
            moved += strip.num_bytes
        self._cuda.call("cuEventRecord", self._events[Lane.IN][0], stream)
        self._cuda.call("cuEventSynchronize", self._events[Lane.IN][0])
        return moved

    def _goes_by_kernel(self, piece_bytes: int, use: KernelUse) -> bool:
        """Whether it is faster is measured on this GPU with scratch memory: pieces of this size, from the host."""
        if self._kernel is None or piece_bytes % KERNEL_ALIGNMENT:
            return False
        try:
            return use == "always" or self._measure(piece_bytes)
        except DeviceError as error:
            if self._cuda.is_lost:
                raise
            logger.info("event=copy_not_measured reason=%s", error)  # a full GPU has no room for it
            return False

    def _measure(self, piece_bytes: int) -> bool:
        num_pieces = max(1, min(_MEASURED_PIECES, _MEASURED_BYTES // piece_bytes))
        with contextlib.ExitStack() as scratch:
            host = int(self._cuda.call("cuMemHostAlloc", num_pieces * piece_bytes, 3))
            scratch.callback(self._cuda.call, "cuMemFreeHost", host)
            on_gpu = int(self._cuda.call("cuMemAlloc", num_pieces * piece_bytes))
            scratch.callback(self._cuda.call, "cuMemFree", on_gpu)
            seconds = self._race(host, on_gpu, num_pieces, piece_bytes)
        logger.info("event=copy_measured piece_bytes=%d memcpy=%.6f kernel=%.6f", piece_bytes, *seconds)
        return seconds[1] * _WORTH < seconds[0]

    def _race(self, host: int, on_gpu: int, num_pieces: int, piece_bytes: int) -> list[float]:
        """Seconds of copies by the copy engines and by the kernel."""
        offsets = np.arange(num_pieces, dtype=np.uint64) * np.uint64(piece_bytes)
        to, source = np.ascontiguousarray(np.uint64(on_gpu) + offsets[::-1]), np.uint64(host) + offsets
        stream = self._streams[Lane.IN]
        return [
            self._time(partial(copier.copy_pieces, to, source, piece_bytes, stream))
            for copier in (self._cuda, self._tables[Lane.IN])
        ]

    def _time(self, start: Callable[[], None]) -> float:
        """The best of some runs, the first one not counted."""
        found = []
        for _ in range(6):
            begun = SYSTEM_CLOCK.now()
            start()
            self._cuda.call("cuStreamSynchronize", self._streams[Lane.IN])
            found.append(SYSTEM_CLOCK.now() - begun)
        return min(found[1:])

    def bind_thread(self) -> None:
        self._cuda.bind_thread()

    @property
    def is_lost(self) -> bool:
        return self._cuda.is_lost

    def close(self) -> None:
        """Give back what the driver holds for this device; after a loss nothing can be given back but by the end."""
        pinned, streams, events = self._pinned, self._streams.values(), self._events.values()
        tables, kernel = self._tables.values(), self._kernel
        self._pinned, self._streams, self._events, self._tables, self._kernel = [], {}, {}, {}, None
        if self._cuda.is_lost:
            return
        for address in pinned:
            self._cuda.call("cuMemHostUnregister", address)
        for stream in streams:
            self._cuda.call("cuStreamDestroy", stream)
        for event in itertools.chain.from_iterable(events):
            self._cuda.call("cuEventDestroy", event)
        if kernel is not None:
            for table in tables:
                table.close()
            kernel.close()


def _misaligned(to: Addresses, source: Addresses) -> bool:
    mask = np.uint64(KERNEL_ALIGNMENT - 1)
    return bool(((to | source) & mask).any())


def _kernel_or_none(cuda: Cuda) -> CopyKernel | None:
    try:
        return CopyKernel(cuda)
    except DeviceError as error:
        if cuda.is_lost:
            raise
        logger.info("event=no_copy_kernel reason=%s", error)
        return None


def open_cuda(setup: DeviceSetup, images: Bytes) -> tuple[CudaDevice, KVHandle | None]:
    """A rank's device: the worker's KV arrays opened, or new ones made where the set-up names none.

    Raises:
        DeviceError: bindings, driver or device are missing, or the driver refuses.
        LayoutError: the arrays do not fit.
    """
    cuda, layout, num_gpu_blocks = Cuda(setup.device_id), setup.layout, setup.num_gpu_blocks
    if setup.kv is None:
        num_bytes = layout.gpu_bytes(num_gpu_blocks)
        base = cuda.call("cuMemAlloc", num_bytes)
        cuda.call("cuMemsetD8", base, 0, num_bytes)
        cuda.call("cuCtxSynchronize")  # or late zeros could overwrite a first load: its stream waits for no other
        kv = KVHandle((_segment(cuda, base, num_bytes),), layout.places(num_gpu_blocks))
        return _device(setup, cuda, [int(base)], kv.places, images), kv
    layout.check_places(setup.kv.places, [segment.num_bytes for segment in setup.kv.segments], num_gpu_blocks)
    bases = [open_segment(cuda, segment) for segment in setup.kv.segments]
    return _device(setup, cuda, bases, setup.kv.places, images), None


def _device(setup: DeviceSetup, cuda: Cuda, bases: list[int], places: Places, images: Bytes) -> CudaDevice:
    return CudaDevice(
        setup.layout, cuda, bases=bases, places=places, images=images, num_gpu_blocks=setup.num_gpu_blocks
    )


def _segment(cuda: Cuda, base: Any, num_bytes: int) -> SegmentHandle:
    handle = cuda.call("cuIpcGetMemHandle", base)
    ipc_handle = ctypes.string_at(handle.getPtr(), _IPC_HANDLE_BYTES)
    return SegmentHandle(kind="cuda", num_bytes=num_bytes, ipc_handle=ipc_handle)


def open_segment(cuda: Cuda, segment: SegmentHandle) -> int:
    """The address here of another process's allocation; the driver closes it with this process.

    Raises:
        LayoutError: it is no GPU memory.
        DeviceError: the owner is gone, or its allocator's memory cannot be shared (it must come from cuMemAlloc).
    """
    if segment.kind != "cuda":
        raise LayoutError("these KV arrays are in CPU memory; the cuda device needs them on the GPU")
    if len(segment.ipc_handle) != _IPC_HANDLE_BYTES:
        raise LayoutError(f"a CUDA IPC handle has {_IPC_HANDLE_BYTES} bytes, this one {len(segment.ipc_handle)}")
    handle = cuda.driver.CUipcMemHandle()
    ctypes.memmove(handle.getPtr(), segment.ipc_handle, _IPC_HANDLE_BYTES)
    lazy = cuda.driver.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
    return int(cuda.call("cuIpcOpenMemHandle", handle, lazy))


def export_kv(layout: RankLayout, layers: Sequence[Mapping[str, Any]], device_id: int) -> KVHandle:
    """The handle of a worker's KV arrays on the GPU, which are tensors of PyTorch or Paddle, or `ArrayPlace`s.

    Several arrays inside one pooled allocation share its handle; each one's place is its offset there. The worker keeps
    the arrays until the engine has let them go (`kv_lost`, or its end).

    Raises:
        LayoutError: they do not fit the layout, or are not on a GPU.
        DeviceError: the driver refuses: memory of cuMemCreate or cudaMallocAsync (PyTorch's expandable_segments,
            Paddle's virtual memory growth) cannot be shared.
    """
    cuda = Cuda(device_id)
    bases: dict[int, int] = {}  # allocation -> its segment
    segments: list[SegmentHandle] = []

    def home_of(_: KVPart, array: ArrayPlace, __: int) -> tuple[int, int]:
        if (array.device, array.device_id) != ("cuda", device_id):
            raise LayoutError(f"an array is on {array.device}:{array.device_id}; export_kv is for GPU {device_id}")
        base, num_bytes = cuda.call("cuMemGetAddressRange", array.address)
        if int(base) not in bases:
            bases[int(base)] = len(segments)
            segments.append(_segment(cuda, base, int(num_bytes)))
        return bases[int(base)], array.address - int(base)

    places = placed(layout, layers, home_of)
    return KVHandle(tuple(segments), places)
