"""What a test cannot do without: it is skipped for want of it, but fails in CI, which has everything."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec
from pathlib import Path

import pytest


def missing(what: str) -> None:
    """Skip the test for want of something, or fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI has to have {what}")
    pytest.skip(f"needs {what}")


def need_mooncake() -> Path:
    """The folder of Mooncake's package, with the library that it loads."""
    try:
        ctypes.CDLL("libibverbs.so.1")
    except OSError:
        missing("libibverbs.so.1 (apt-get install libibverbs1)")
    spec = find_spec("mooncake")
    if spec is None or spec.origin is None:
        missing("Mooncake (pip install mooncake-transfer-engine-non-cuda)")
    assert spec and spec.origin
    return Path(spec.origin).parent


def need_nixl() -> None:
    """NIXL's package alone: with dependencies it brings PyTorch for CUDA."""
    if find_spec("nixl_cu12") is None:
        missing("NIXL (pip install --no-deps nixl-cu12)")
