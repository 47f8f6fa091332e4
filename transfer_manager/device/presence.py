"""Whether the configured device can be here at all, asked by the engine's process without touching it."""

from __future__ import annotations

import ctypes
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.util import find_spec

from fastdeploy_cache.errors import DeviceError

_BINDINGS = "cuda.bindings.driver"


def check_presence(device: str) -> None:
    """Raise `DeviceError` where the bindings or the driver of the device are missing on this machine.

    The driver is not initialised here: a process that has done that cannot fork workers which use the GPU. A GPU that
    is missing beside a driver is found by the ranks.
    """
    if device != "cuda" or not _needs_library():
        return
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise DeviceError(
            f"transfer.device is 'cuda', and no NVIDIA driver can be loaded ({error}); install it, or use 'cpu'"
        ) from error


def _needs_library() -> bool:
    """Whether the bindings are NVIDIA's, which are compiled; a simulation brings a driver of its own."""
    try:
        bindings = find_spec(_BINDINGS)
    except ModuleNotFoundError:  # a package above it
        bindings = None
    except ValueError:  # it is loaded, and from no file
        return False
    if bindings is None:
        missing = "transfer.device is 'cuda', which needs NVIDIA's bindings"
        raise DeviceError(f"{missing}; run: pip install 'cuda-bindings>=12.9.1'")
    return (bindings.origin or "").endswith(tuple(EXTENSION_SUFFIXES))
