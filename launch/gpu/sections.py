"""The sections of the report: what each runs, for how long at most, and what it cannot do without."""

from __future__ import annotations

import importlib
import json
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

_HERE = "fastdeploy_cache.launch.gpu"
DEVICE_NEEDS = ("numpy", "msgspec", "cuda.bindings")
_RANKS = (*DEVICE_NEEDS, "zmq")
_MANAGER = (*_RANKS, "prometheus_client")
_OF_VLLM = (*_MANAGER, "safetensors", "psutil")


@dataclass(frozen=True)
class Section:
    """One part of the report. `entry` is `module:function`; it gets `Notes` and `GpuOptions`."""

    name: str
    title: str
    entry: str
    deadline_seconds: float
    needs: tuple[str, ...] = ()  # modules, ours or everybody's
    framework: str = ""  # a module without which there is nothing to show, and no fault


SECTIONS = (
    Section("environment", "Environment", f"{_HERE}.environment:run", 40),
    Section("steps", "The driver's calls, one by one", f"{_HERE}.first_steps:run", 30, DEVICE_NEEDS),
    Section("device", "Copies of the device, byte for byte", f"{_HERE}.device_bytes:run", 80, DEVICE_NEEDS),
    Section("bandwidth", "Speed", f"{_HERE}.bandwidth:run", 120, _RANKS),
    Section("arrays", "Arrays of another process, by CUDA IPC", f"{_HERE}.arrays:run", 40, _RANKS),
    Section("torch", "Arrays of PyTorch, by CUDA IPC", f"{_HERE}.torch_arrays:run", 60, _RANKS, "torch"),
    Section("paddle", "Arrays of Paddle, by CUDA IPC", f"{_HERE}.paddle_arrays:run", 45, _RANKS, "paddle"),
    Section("kills", "Ranks killed under load", f"{_HERE}.kills:run", 60, _RANKS),
    Section("engine", "The reference engine, its KV arrays on the GPU", f"{_HERE}.engine:run", 60, _MANAGER),
    Section("vllm", "vLLM with the connector", f"{_HERE}.vllm_run:run", 200, _OF_VLLM, "vllm"),
)


def _end(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def main() -> None:
    """Run one section in this process: its entry, the file for its notes and the options as JSON are the arguments."""
    from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes

    signal.signal(signal.SIGTERM, _end)  # what a section has started in a session of its own is ended by it
    entry, file, options = sys.argv[1:4]
    module, _, function = entry.partition(":")
    getattr(importlib.import_module(module), function)(Notes(Path(file)), GpuOptions(**json.loads(options)))


if __name__ == "__main__":
    main()
