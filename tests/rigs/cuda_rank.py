"""A rank's CUDA device over a simulated driver that notes what it is asked for, and small layouts for it."""

from __future__ import annotations

import numpy as np

from fastdeploy_cache.transfer_manager.device.base import DeviceSetup
from fastdeploy_cache.transfer_manager.device.cuda import CudaDevice, open_cuda, open_segment
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.fake_cuda import FakeDriver

NUM_GPU, NUM_CPU = 6, 7
# large enough that each layer is a step of its own
LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=1024, dtype="float32").for_rank(1, 8)
SMALL = KVLayout(num_layers=2, num_kv_heads=2, head_dim=8).for_rank(1, 4)
PART = SMALL.parts[0].num_bytes
OUT, IN, COPY = TaskKind.SWAP_OUT, TaskKind.SWAP_IN, TaskKind.COPY
IDS = np.array([4, 0, 1], np.int32), np.array([5, 6, 2], np.int32)  # on the GPU, on the CPU


class RecordingDriver(FakeDriver):
    """Notes how memory was registered and unregistered, and the copies that were done."""

    def __init__(self, version: int = 13000, num_devices: int = 1) -> None:
        super().__init__(version, num_devices)
        self.registered: list[tuple[int, int]] = []
        self.unregistered: list[int] = []
        self.num_done = 0

    def cuMemHostRegister(self, address: int, num_bytes: int, flags: int) -> None:  # noqa: N802 (NVIDIA's name)
        self.registered.append((address, num_bytes))
        super().cuMemHostRegister(address, num_bytes, flags)

    def cuMemHostUnregister(self, address: int) -> None:  # noqa: N802
        self.unregistered.append(address)
        super().cuMemHostUnregister(address)

    def _copy(self, to: int, source: int, num_bytes: int) -> None:
        self.num_done += 1
        super()._copy(to, source, num_bytes)

    @property
    def num_pending(self) -> int:
        """Copies that were started and are not done."""
        return sum(len(queue) - self._done[stream] for stream, queue in self._queues.items())


def setup_of(kv: KVHandle | None, layout: object = LAYOUT, device_id: int = 0) -> DeviceSetup:
    """What a rank is told of its device."""
    return DeviceSetup(
        rank=0,
        kind="cuda",
        device_id=device_id,
        layout=layout,  # type: ignore[arg-type]
        num_gpu_blocks=NUM_GPU,
        num_cpu_blocks=NUM_CPU,
        kv=kv,
    )


def on_gpu(driver: FakeDriver, handle: KVHandle) -> np.ndarray:
    """The fake GPU memory of the only segment, by layer and part: [layers, parts, blocks, bytes]."""
    cuda = Cuda(0)
    base = open_segment(cuda, handle.segments[0])
    buffer = driver._buffers[base]
    flat = np.frombuffer(buffer, np.uint8)
    start = base - flat.ctypes.data
    flat = flat[start : start + handle.segments[0].num_bytes]
    return flat.reshape(LAYOUT.num_layers, len(LAYOUT.parts), NUM_GPU, -1)


def opened(images: np.ndarray) -> tuple[CudaDevice, KVHandle]:
    """A device that has made its own KV arrays."""
    device, handle = open_cuda(setup_of(None), images)
    assert handle is not None
    return device, handle
