"""The machine that figures were taken on; part of every result."""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import Any

import numpy as np


def describe_machine() -> dict[str, Any]:
    """Processor, cores this process may use, load, versions."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    for line in info.read_text().splitlines() if info.exists() else []:
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    busy = f"BUSY (load {load:.1f} on {cores} cores): these figures mean little" if load > cores else ""
    python, numpy = platform.python_version(), np.__version__
    return {
        "processor": model,
        "num_cores": cores,
        "load": load,
        "busy": busy,  # a remark to print beside figures, or nothing
        "python": python,
        "numpy": numpy,
        "platform": sys.platform,
        "text": f"{model}, {cores} cores, load {load:.1f}; Python {python}, NumPy {numpy}{busy and '; ' + busy}",
    }
