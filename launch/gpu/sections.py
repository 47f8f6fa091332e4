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


@dataclass(frozen=True, kw_only=True)
class Section:
    """One part of the report. `entry` is `module:function`; it gets `Notes` and `GpuOptions`."""

    name: str
    title: str
    entry: str
    deadline_seconds: float
    needs: tuple[str, ...] = ()  # modules, ours or everybody's
    framework: str = ""  # a module without which there is nothing to show, and no fault


SECTIONS = (
    Section(name="environment", title="Environment", entry=f"{_HERE}.environment:run", deadline_seconds=40),
    Section(
        name="steps",
        title="The driver's calls, one by one",
        entry=f"{_HERE}.first_steps:run",
        deadline_seconds=30,
        needs=DEVICE_NEEDS,
    ),
    Section(
        name="device",
        title="Copies of the device, byte for byte",
        entry=f"{_HERE}.device_bytes:run",
        deadline_seconds=80,
        needs=DEVICE_NEEDS,
    ),
    Section(name="bandwidth", title="Speed", entry=f"{_HERE}.bandwidth:run", deadline_seconds=120, needs=_RANKS),
    Section(
        name="arrays",
        title="Arrays of another process, by CUDA IPC",
        entry=f"{_HERE}.arrays:run",
        deadline_seconds=40,
        needs=_RANKS,
    ),
    Section(
        name="torch",
        title="Arrays of PyTorch, by CUDA IPC",
        entry=f"{_HERE}.torch_arrays:run",
        deadline_seconds=60,
        needs=_RANKS,
        framework="torch",
    ),
    Section(
        name="paddle",
        title="Arrays of Paddle, by CUDA IPC",
        entry=f"{_HERE}.paddle_arrays:run",
        deadline_seconds=45,
        needs=_RANKS,
        framework="paddle",
    ),
    Section(
        name="kills", title="Ranks killed under load", entry=f"{_HERE}.kills:run", deadline_seconds=60, needs=_RANKS
    ),
    Section(
        name="engine",
        title="The reference engine, its KV arrays on the GPU",
        entry=f"{_HERE}.engine:run",
        deadline_seconds=60,
        needs=_MANAGER,
    ),
    Section(
        name="vllm",
        title="vLLM with the connector",
        entry=f"{_HERE}.vllm_run:run",
        deadline_seconds=200,
        needs=(*_MANAGER, "safetensors", "psutil"),
        framework="vllm",
    ),
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
