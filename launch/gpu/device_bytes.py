"""Section: every copy that the CUDA device can make, beside the same copy by the processor's device, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.errors import DeviceError, LaunchError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.gpu.gpu_memory import GpuMemory, expect_equal, noise
from fastdeploy_cache.launch.gpu.layouts import HYBRID_LAYOUTS, ID_PAIRS, LAYOUTS, NUM_CPU_BLOCKS, NUM_GPU_BLOCKS
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.transfer_manager.device.copy_kernel import CopyKernel
from fastdeploy_cache.transfer_manager.device.cpu import CpuDevice
from fastdeploy_cache.transfer_manager.device.cuda import CudaDevice, KernelUse
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.device.images import CheckpointImage
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.task import LEFT_OUT, TaskKind

_QUICK = ("float16", "steps", "extra layers", "block first", "uneven")
_noise = lru_cache(maxsize=4)(noise)
_SWAPS = (TaskKind.SWAP_OUT, TaskKind.SWAP_IN)
_BAD_IDS = (([0, NUM_GPU_BLOCKS], [0, 1]), ([0, 1], [0, NUM_CPU_BLOCKS]), ([0, -1], [0, 1]), ([0, 1, 2], [0, 1]))


class CopyWay(NamedTuple):
    """One way by which pieces can go."""

    name: str
    may_batch: bool
    kernel: KernelUse


WAYS = (
    CopyWay("a call for each piece", may_batch=False, kernel="never"),
    CopyWay("batches of copies", may_batch=True, kernel="never"),
    CopyWay("the kernel", may_batch=True, kernel="always"),
    CopyWay("what is measured to be faster", may_batch=True, kernel="measured"),
)


def run(notes: Notes, options: GpuOptions) -> None:
    """Every layout, by every way; the kernel last, as what it spoils stays spoilt in this process."""
    names = _QUICK if options.is_quick else tuple(LAYOUTS)
    for way in WAYS:
        cuda = Cuda(0, may_batch=way.may_batch)
        if way.may_batch and way.kernel == "never" and not cuda.has_batch:
            notes.skip(way.name, "this driver has no batched copy; it begins with 12.8")
            continue
        if way.kernel == "always" and not notes.check("the kernel is compiled", partial(_compile, cuda)):
            continue
        checks = {name: partial(_check_layout, LAYOUTS[name]) for name in names}
        checks |= {f"checkpoints, {name}": partial(_check_images, each) for name, each in HYBRID_LAYOUTS.items()}
        for name, check in checks.items():
            notes.check(f"{name}, by {way.name}", partial(check, cuda, way.kernel))
            if cuda.is_lost:
                notes.note(way.name, "the GPU is lost to this process; the rest is left out", outcome="wrong")
                return


def _compile(cuda: Cuda) -> str:
    CopyKernel(cuda).close()
    return "by NVRTC, for this GPU"


class _Twins:
    """A CUDA device and a processor's device, each over memory of its own with the same bytes."""

    def __init__(self, layout: RankLayout, cuda: Cuda, use: KernelUse, gpu: GpuMemory, images: SharedArray) -> None:
        self.layout, self.gpu = layout, gpu
        shape = (NUM_CPU_BLOCKS, layout.block_bytes)
        self.images, self.kv_twin = images.view(np.uint8, shape), np.zeros(gpu.num_bytes, np.uint8)
        self.images_twin = np.zeros(shape, np.uint8)
        places = layout.places(NUM_GPU_BLOCKS)
        self.device = CudaDevice(
            layout,
            cuda,
            bases=[gpu.address],
            places=places,
            images=self.images,
            num_gpu_blocks=NUM_GPU_BLOCKS,
            kernel=use,
        )
        self.twin = CpuDevice(layout, [self.kv_twin], places, self.images_twin, NUM_GPU_BLOCKS)

    def fill(self, seed: int) -> None:
        """The same noise on both sides."""
        kv, images = _noise(seed, self.gpu.num_bytes), _noise(seed + 1, self.images.nbytes)
        self.gpu.write(kv)
        self.kv_twin[:] = kv
        self.images[:] = self.images_twin[:] = images.reshape(self.images.shape)

    def copy(
        self,
        kind: TaskKind,
        sources: list[int],
        destinations: list[int],
        num_tokens: int | None = None,
        on_layer: Callable[[int], None] | None = None,
    ) -> None:
        """The same copy on both sides. Raises `LaunchError` where anything is not the same afterwards."""
        ids = np.array(sources, np.int32), np.array(destinations, np.int32)
        wanted = self.twin.copy(kind, *ids, lambda _: None, num_tokens)
        told: list[int] = []

        def hear(num_layers: int) -> None:
            told.append(num_layers)
            if on_layer is not None:
                on_layer(num_layers)

        moved = self.device.copy(kind, *ids, hear, num_tokens)
        what = f"{kind.value} of {sources} to {destinations}" + (f", {num_tokens} tokens" if num_tokens else "")
        if moved != wanted:
            raise LaunchError(f"{what}: {moved} bytes are said to have moved, and {wanted} should have")
        if told != sorted(set(told)) or told[-1] != self.layout.num_layers:
            raise LaunchError(f"{what}: layers were told as {told}, of {self.layout.num_layers}")
        self.compare(what)

    def move(self, kind: TaskKind, units: list[list[int]]) -> None:
        """The same checkpoint on both sides, through pages that lie backwards and apart."""
        ids = tuple(np.array(each, np.int32) for each in units)
        num_bytes = sum(len(each) * self.layout.unit_bytes(row) for row, each in enumerate(ids, 1))
        num_pages = -(-num_bytes // self.layout.block_bytes)
        pages = np.array([(3 - 2 * number) % NUM_CPU_BLOCKS for number in range(num_pages)], np.int32)
        for device in (self.twin, self.device):
            told = list[int]()
            for _ in device.move_image(kind, CheckpointImage(ids, pages), told.append):
                pass
            if told[-1] != self.layout.num_layers:
                raise LaunchError(f"{kind.value} of {units}: layers were told as {told}, of {self.layout.num_layers}")
        self.compare(f"{kind.value} of a checkpoint of units {units}")

    def copy_units(self, row: int, num_tokens: int | None) -> None:
        """The same copy within a row on both sides."""
        sources, destinations = np.array([5, 0], np.int32), np.array([2, 6], np.int32)
        for device in (self.twin, self.device):
            device.copy_units(row, sources, destinations, num_tokens)
        self.compare(f"a copy of units of row {row}, {num_tokens or 'all'} tokens")

    def compare(self, what: str) -> None:
        """Both tiers, whole: what was to be written, and what was not."""
        expect_equal(f"{what}: CPU blocks", self.images, self.images_twin)
        expect_equal(f"{what}: GPU memory", self.gpu.read(), self.kv_twin)


@contextmanager
def _twins(layout: RankLayout, cuda: Cuda, use: KernelUse) -> Iterator[_Twins]:
    gpu = GpuMemory(cuda, layout.gpu_bytes(NUM_GPU_BLOCKS))
    images = SharedArray.create("gpu-check", NUM_CPU_BLOCKS * layout.block_bytes)
    twins = _Twins(layout, cuda, use, gpu, images)
    try:
        yield twins
    finally:
        twins.device.close()
        if not cuda.is_lost:
            gpu.close()
        images.close()


def _check_layout(layout: RankLayout, cuda: Cuda, use: KernelUse) -> str:
    num_copies = 0
    with _twins(layout, cuda, use) as twins:
        for gpu_ids, cpu_ids in ID_PAIRS:
            twins.fill(num_copies)
            twins.copy(TaskKind.SWAP_OUT, gpu_ids, cpu_ids)
            twins.copy(TaskKind.SWAP_IN, cpu_ids, gpu_ids[1:] + gpu_ids[:1])  # to other blocks than they came from
            num_copies += 2
        for num_tokens in (None, 1, 3):
            twins.copy(TaskKind.COPY, [9, 2, 3], [0, 5, 6], num_tokens)
            num_copies += 1
        _check_order(twins)
        _check_refusals(twins)
        by_kernel = sorted(twins.device.kernel_piece_bytes)
    sizes = f"; by the kernel: pieces of {', '.join(map(str, by_kernel))} bytes" if by_kernel else ""
    return f"{num_copies + 1} copies{sizes}"


def _check_images(layout: RankLayout, cuda: Cuda, use: KernelUse) -> str:
    """Checkpoints of as many units of each row as one has, and of fewer; loads that leave some out; and copies within
    each row."""
    whole = [[5, 1, 2, 6][: row.num_checkpoint_units] for row in layout.rows[1:]]
    with _twins(layout, cuda, use) as twins:
        for number, units in enumerate((whole, [whole[0][:1], *([] for _ in whole[1:])], [[], *whole[1:]])):
            twins.fill(number)
            twins.move(TaskKind.SWAP_OUT, units)
            twins.move(TaskKind.SWAP_IN, [ids[::-1] for ids in units])
            twins.move(TaskKind.SWAP_IN, [[LEFT_OUT, *ids[1:]] if ids else ids for ids in units])
        for row in range(1, len(layout.rows)):
            for num_tokens in (None, 2):
                twins.copy_units(row, num_tokens)
    return "as by the processor"


def _check_order(twins: _Twins) -> None:
    """When a layer is told, its bytes are in: read beside a load that still goes on."""
    twins.fill(7)
    gpu_ids, cpu_ids = [4, 0, 11], [1, 6, 16]
    layout, places = twins.layout, twins.layout.places(NUM_GPU_BLOCKS)

    def on_layer(num_layers: int) -> None:
        views = layout.kv_views([twins.gpu.read()], places)[:num_layers]
        wanted = layout.kv_views([twins.kv_twin], places)[:num_layers]
        for layer, (found, expected) in enumerate(zip(views, wanted, strict=True)):
            for name, array in found.items():
                pieces = [np.ascontiguousarray(each[gpu_ids]).view(np.uint8) for each in (array, expected[name])]
                expect_equal(f"layer {layer} {name} when {num_layers} layers were told", *pieces)

    twins.copy(TaskKind.SWAP_IN, cpu_ids, gpu_ids, on_layer=on_layer)


def _check_refusals(twins: _Twins) -> None:
    """Impossible ids: an error, and no byte has moved."""
    for kind in _SWAPS:
        for gpu_ids, cpu_ids in _BAD_IDS:
            ids = (cpu_ids, gpu_ids) if kind is TaskKind.SWAP_IN else (gpu_ids, cpu_ids)
            try:
                twins.device.copy(kind, np.array(ids[0], np.int32), np.array(ids[1], np.int32), lambda _: None)
            except DeviceError:
                twins.compare(f"{kind.value} that was refused")
            else:
                raise LaunchError(f"{kind.value} of {ids[0]} to {ids[1]} was not refused")
