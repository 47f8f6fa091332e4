"""What the sections import: found in this Python, or installed into a folder beside the checkout where that can be."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

# module -> what pip calls it; all that the sections need but frameworks
PACKAGES = {
    "numpy": "numpy",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "xxhash": "xxhash",
    "prometheus_client": "prometheus-client",
    "rich": "rich",
    "cuda.bindings": "cuda-bindings>=12.9.1",
}
_WAIT_SECONDS = 90.0


def is_here(module: str) -> bool:
    """Whether a module can be found. Its import may still fail."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package above it is missing
        return False


def missing_packages() -> list[str]:
    """Modules of `PACKAGES` that this Python has not."""
    return [module for module in PACKAGES if not is_here(module)]


def has_libcuda() -> bool:
    """Whether the driver's library is here, asked without any package."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def has_driver() -> bool:
    """Whether there is any sign of NVIDIA's driver."""
    return has_libcuda() or shutil.which("nvidia-smi") is not None


def install_packages(modules: Sequence[str], folder: Path, wheels: Path | None) -> str | None:
    """Install what these modules come from into `folder`, from wheels or from pip's registry; why it failed, if so.

    Nothing of this Python's own packages is changed: the folder is put before them where it is wanted.
    """
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    if wheels is not None:
        files = sorted(str(path) for path in wheels.glob("*.whl"))
        if not files:
            return f"{wheels} holds no wheels"
        command = [*pip, "--no-index", "--no-deps", "--upgrade", *files]
    else:
        # to build one would take long, and what pip has started for it would outlive pip's own deadline
        command = [*pip, "--only-binary=:all:", "--retries", "0", "--timeout", "5"]
        command += [PACKAGES[module] for module in modules]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return f"pip took more than {_WAIT_SECONDS:.0f} s"
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return None if done.returncode == 0 else (lines[-1] if lines else f"pip ended with status {done.returncode}")
