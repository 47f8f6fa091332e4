"""The only file that imports Paddle: late, quietly, with its threads limited and its install checked."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache.errors import ModelLoadError

_DISTRIBUTIONS = ("paddlepaddle", "paddlepaddle-gpu")


def import_paddle(num_threads: int = 1) -> Any:
    """Import Paddle and return the module.

    The first call also takes back the signal handlers that Paddle installs; set your own after it.
    Paddle reads its thread count while it is imported, so only the first call in a process can set it,
    and an ``OMP_NUM_THREADS`` that is already in the environment wins.

    Args:
        num_threads: OpenMP threads. More than one only pays on cores that nothing else uses.

    Raises:
        ModelLoadError: Paddle is missing, cannot be imported, or is installed twice.
    """
    check_distributions()
    is_first = "paddle" not in sys.modules
    os.environ.setdefault("OMP_NUM_THREADS", str(num_threads))
    os.environ.setdefault("GLOG_minloglevel", "2")
    if _is_amd_with_avx2():
        # Paddle's MKL (2019) takes a slow path on AMD unless told that AVX2 is there: prefill doubles.
        os.environ.setdefault("MKL_DEBUG_CPU_TYPE", "5")
    try:
        # Paddle remarks on ccache (a warning) and on OMP_NUM_THREADS (a print to stderr).
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            import paddle
    except ImportError as error:
        raise ModelLoadError(f"cannot import paddle ({error}); run: pip install 'fastdeploy-cache[demo]'") from error
    if is_first:
        paddle.disable_signal_handler()  # or SIGTERM would print a crash report and end the process at once
    return paddle


def check_distributions(version_of: Callable[[str], str] = metadata.version) -> None:
    """Refuse an environment that holds both Paddle distributions: they overwrite each other's files.

    Raises:
        ModelLoadError: names both with their versions.
    """
    found = []
    for name in _DISTRIBUTIONS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {version_of(name)}")
    if len(found) > 1:
        raise ModelLoadError(
            f"{' and '.join(found)} are both installed and overwrite each other; uninstall one: "
            f"pip uninstall {_DISTRIBUTIONS[1]}, then reinstall the other"
        )


def share_array(array: np.ndarray[Any, Any], paddle: Any = None) -> Any:
    """A Paddle CPU tensor over the very memory of ``array``; writes show on both sides.

    The tensor keeps ``array`` alive, but not memory that was closed under it (a shared memory segment).

    Args:
        array: C-contiguous, writable, any dtype that Paddle knows.
        paddle: the module to use; the real one unless a test passes another.

    Raises:
        ModelLoadError: this Paddle copies instead of sharing.
    """
    module = import_paddle() if paddle is None else paddle
    try:
        tensor = module.from_dlpack(array)
        address = tensor.data_ptr()
    except (AttributeError, BufferError, TypeError, RuntimeError) as error:
        raise ModelLoadError(_no_sharing(module, str(error).strip().partition("\n")[0])) from error
    if address != array.ctypes.data:
        raise ModelLoadError(_no_sharing(module, f"address {address:#x}, expected {array.ctypes.data:#x}"))
    return tensor


def _no_sharing(module: Any, reason: str) -> str:
    version = getattr(module, "__version__", "of unknown version")
    return (
        f"paddle {version} does not share numpy memory through from_dlpack ({reason}); "
        "Paddle >= 3.0 is needed: pip install 'paddlepaddle>=3.0'"
    )


def _is_amd_with_avx2() -> bool:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "AuthenticAMD" in text and " avx2 " in text
