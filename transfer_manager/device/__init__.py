"""Where a rank's KV arrays live and how blocks are copied from and to them."""

from __future__ import annotations

import os
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.device.base import Device, DeviceSetup
from fastdeploy_cache.transfer_manager.device.cpu import CpuDevice
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVMemory


class OpenedDevice(NamedTuple):
    """A rank's device, and the handle of its KV arrays where the rank itself has made them."""

    device: Device
    new_kv: KVHandle | None
    memory: object  # kept as long as the device


def open_device(setup: DeviceSetup, cpu: SharedArray) -> OpenedDevice:
    """Attach the rank's KV arrays, or make them where the set-up names none.

    Raises:
        DeviceError: there is no such device.
        IPCError, LayoutError: the KV arrays cannot be attached.
    """
    shape = (setup.num_cpu_blocks, setup.layout.block_bytes)
    images = cpu.view(np.uint8, shape) if setup.num_cpu_blocks else np.empty(shape, np.uint8)
    if setup.kind == "cuda":
        from fastdeploy_cache.transfer_manager.device.cuda import open_cuda  # late: needs NVIDIA's bindings

        cuda, new_kv = open_cuda(setup, images)
        return OpenedDevice(cuda, new_kv, cpu)
    if setup.kv is None:
        kv = KVMemory.create(setup.layout, setup.num_gpu_blocks, f"kv-rank{setup.rank}")
    else:
        kv = KVMemory.open(setup.layout, setup.num_gpu_blocks, setup.kv)
    has_cores = len(os.sched_getaffinity(0)) > 1
    device = CpuDevice(setup.layout, kv.flat(), kv.places, images, setup.num_gpu_blocks, may_share=has_cores)
    return OpenedDevice(device, kv.handle() if setup.kv is None else None, kv)
