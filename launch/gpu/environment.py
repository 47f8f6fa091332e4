"""The first section: which GPUs, driver, Python and packages there are, and what about them is known to matter."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import DeviceError
from fastdeploy_cache.launch.bench.gpu_machine import GpuFacts, describe_gpus, read_link, short_bus_id
from fastdeploy_cache.launch.gpu.notes import OK, SKIPPED, GpuOptions, Notes
from fastdeploy_cache.launch.gpu.packages import has_libcuda

_DISTRIBUTIONS = (
    *("numpy", "msgspec", "pyzmq", "xxhash", "prometheus-client", "rich", "typer", "cuda-bindings"),
    *(
        "nvidia-cuda-nvrtc",
        "nvidia-cuda-nvrtc-cu12",
        "torch",
        "paddlepaddle-gpu",
        "paddlepaddle",
        "vllm",
        "safetensors",
    ),
)
_SHM = "/dev/shm"  # noqa: S108 (where CUDA and PyTorch share memory)
_LEAST_BINDINGS = (12, 9, 1)  # the first that let other threads run during a call: a heart must beat beside a copy
_ATTRIBUTES = {
    "host addresses of pinned memory": "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM",
    "copy engines": "ASYNC_ENGINE_COUNT",
    "unified addressing": "UNIFIED_ADDRESSING",
    "integrated": "INTEGRATED",
}


def run(notes: Notes, options: GpuOptions) -> None:  # noqa: ARG001 (one signature for all sections)
    """Write down what is here. The fact `num_gpus` is how many GPUs the driver lets this process use."""
    _note_host(notes)
    versions = _note_packages(notes)
    listed = describe_gpus()
    for gpu in listed:
        link = gpu.pcie_gb_per_second
        modes = f"compute mode {gpu.compute_mode or 'unknown'}, MIG {gpu.mig_mode or 'unknown'}"
        text = f"{gpu.name}, {gpu.memory_mib} MiB, driver {gpu.driver}, {modes}; {_link_text(gpu)}"
        outcome = SKIPPED if gpu.compute_mode.startswith(("Exclusive", "Prohibited")) else OK
        text += "; only one process may use it, and ranks are several" if outcome == SKIPPED else ""
        notes.note(
            f"nvidia-smi: GPU {gpu.index}", text, outcome=outcome, **({"pcie_gb_per_second": link} if link else {})
        )
    if not listed:
        notes.skip("nvidia-smi", "it is missing, or lists no GPU")
    notes.fact("num_gpus", 0)
    notes.fact("is_simulated", False)
    notes.fact("has_libcuda", has_libcuda())
    notes.check("driver", partial(_note_driver, notes, {gpu.bus_id: gpu for gpu in listed}, versions))


def _note_host(notes: Notes) -> None:
    notes.note("Python", f"{platform.python_version()} on {platform.platform()}, {os.cpu_count()} processors")
    if Path(_SHM).is_dir():
        memory = shutil.disk_usage(_SHM)
        notes.note(_SHM, f"{memory.free / 2**20:.0f} MiB free of {memory.total / 2**20:.0f}")
    else:
        notes.skip(_SHM, "there is none here")
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    notes.note("locked memory", "no limit" if limit == resource.RLIM_INFINITY else f"at most {limit // 1024} KiB")
    signs = [name for name in ("/.dockerenv", "/run/.containerenv") if Path(name).exists()]
    notes.note("container", f"{signs[0]} is there" if signs else "none that leaves a sign")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    notes.note("CUDA_VISIBLE_DEVICES", "not set" if visible is None else repr(visible))


def _note_packages(notes: Notes) -> dict[str, str]:
    versions = {}
    for name in _DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    notes.fact("packages", versions)
    notes.note("packages", ", ".join(f"{name} {version}" for name, version in versions.items()) or "none of those used")
    return versions


def _link_text(gpu: GpuFacts) -> str:
    link = gpu.pcie_gb_per_second
    if link is None:
        return "its PCIe link cannot be read here"
    return f"PCIe generation {gpu.pcie_generation} with {gpu.pcie_lanes} lanes: {link:.1f} GB/s each way"


def _note_driver(notes: Notes, listed: dict[str, GpuFacts], versions: dict[str, str]) -> str:
    """What the driver itself says, which is asked as the ranks ask it."""
    try:
        from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
    except ImportError as error:
        driver = "an NVIDIA driver is here" if has_libcuda() else "there is no NVIDIA driver, either"
        raise DeviceError(f"the device cannot be loaded ({error}); {driver}") from error
    cuda = Cuda(0)
    num_gpus = int(cuda.call("cuDeviceGetCount"))
    is_simulated = bool(getattr(cuda.driver, "IS_SIMULATED", False))
    notes.fact("num_gpus", num_gpus)
    notes.fact("is_simulated", is_simulated)
    links = [_note_gpu(notes, cuda, number, listed) for number in range(num_gpus)]
    notes.fact("pcie_gb_per_second", min(filter(None, links), default=None))
    _note_bindings(notes, versions, is_simulated=is_simulated)
    version = int(cuda.call("cuDriverGetVersion"))
    what = "SIMULATED: nothing here ran on a GPU; " if is_simulated else ""
    batch = "has" if cuda.has_batch else "has no"
    return f"{what}CUDA {version // 1000}.{version % 1000 // 10}, {num_gpus} GPUs; it {batch} cuMemcpyBatchAsync"


def _note_bindings(notes: Notes, versions: dict[str, str], *, is_simulated: bool) -> None:
    version = versions.get("cuda-bindings", "")
    numbers = tuple(int(part) for part in version.split(".")[:3] if part.isdigit())
    if version and numbers < _LEAST_BINDINGS and not is_simulated:
        notes.note("cuda-bindings", f"{version} holds up other threads; use 12.9.1 or newer", outcome=SKIPPED)


def _note_gpu(notes: Notes, cuda: Any, number: int, listed: dict[str, GpuFacts]) -> float | None:
    device = cuda.call("cuDeviceGet", number)
    names = [cuda.call(call, 64, device) for call in ("cuDeviceGetName", "cuDeviceGetPCIBusId")]
    name, bus_id = (bytes(each).partition(b"\0")[0].decode() for each in names)
    attribute = cuda.driver.CUdevice_attribute
    capability = [_attribute(cuda, device, f"COMPUTE_CAPABILITY_{which}") for which in ("MAJOR", "MINOR")]
    others = [
        f"{text} {_attribute(cuda, device, which)}"
        for text, which in _ATTRIBUTES.items()
        if hasattr(attribute, f"CU_DEVICE_ATTRIBUTE_{which}")
    ]
    total = int(cuda.call("cuDeviceTotalMem", device))
    bus_id = short_bus_id(bus_id)
    generation, lanes = read_link(bus_id)
    known = GpuFacts(index=number, name=name, bus_id=bus_id, pcie_generation=generation, pcie_lanes=lanes)
    gpu = listed.get(bus_id, known)
    capability_text = ".".join(map(str, capability))
    text = f"{name} at {bus_id}, {total / 2**30:.1f} GiB, compute capability {capability_text}, {', '.join(others)}"
    notes.note(f"GPU {number} of this process", f"{text}; {_link_text(gpu)}")
    return gpu.pcie_gb_per_second


def _attribute(cuda: Any, device: Any, name: str) -> int:
    return int(
        cuda.call(
            "cuDeviceGetAttribute", getattr(cuda.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}"), device
        )
    )
