"""Every device, over memory that the test holds; those of a GPU on a fake driver."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.launch.gpu.layouts import NUM_CPU_BLOCKS as NUM_CPU
from fastdeploy_cache.launch.gpu.layouts import NUM_GPU_BLOCKS as NUM_GPU
from fastdeploy_cache.transfer_manager.device import cpu as cpu_device
from fastdeploy_cache.transfer_manager.device.base import Device
from fastdeploy_cache.transfer_manager.device.cpu import CpuDevice
from fastdeploy_cache.transfer_manager.device.cuda import CudaDevice, KernelUse
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from tests.rigs.fake_cuda import FakeDriver, install

MakeDevice = Callable[[RankLayout, SharedArray, SharedArray, pytest.MonkeyPatch], Device]


def make_cpu(layout: RankLayout, kv: SharedArray, cpu: SharedArray, _: pytest.MonkeyPatch) -> Device:
    images = cpu.view(np.uint8, (NUM_CPU, layout.block_bytes))
    return CpuDevice(layout, [kv.view(np.uint8, (kv.num_bytes,))], layout.places(NUM_GPU), images, NUM_GPU)


def make_shared(layout: RankLayout, kv: SharedArray, cpu: SharedArray, monkeypatch: pytest.MonkeyPatch) -> Device:
    """With a second thread for copies of any size, in parts of a block or two."""
    monkeypatch.setattr(cpu_device, "_SHARED_BYTES", 0)
    monkeypatch.setattr(cpu_device, "_JOB_BYTES", 1)
    images = cpu.view(np.uint8, (NUM_CPU, layout.block_bytes))
    segments = [kv.view(np.uint8, (kv.num_bytes,))]
    return CpuDevice(layout, segments, layout.places(NUM_GPU), images, NUM_GPU, may_share=True)


def make_cuda(version: int, kernel: bool) -> MakeDevice:
    """On a fake driver whose GPU memory is CPU memory; small pieces by the kernel, or none."""

    def make(layout: RankLayout, kv: SharedArray, cpu: SharedArray, monkeypatch: pytest.MonkeyPatch) -> Device:
        driver = FakeDriver(version)
        install(monkeypatch, driver, compiler=kernel)
        base = kv.view(np.uint8, (kv.num_bytes,)).ctypes.data
        driver.on_gpu[base] = kv.num_bytes
        images = cpu.view(np.uint8, (NUM_CPU, layout.block_bytes))
        places = layout.places(NUM_GPU)
        use: KernelUse = "always" if kernel else "never"
        return CudaDevice(
            layout, Cuda(0), bases=[base], places=places, images=images, num_gpu_blocks=NUM_GPU, kernel=use
        )

    return make


DEVICES: dict[str, MakeDevice] = {
    "cpu": make_cpu,
    "cpu, two threads": make_shared,
    "cuda, single copies": make_cuda(12000, kernel=False),
    "cuda 12, batched": make_cuda(12080, kernel=False),
    "cuda 13, batched": make_cuda(13000, kernel=False),
    "cuda, kernel": make_cuda(13000, kernel=True),
}
