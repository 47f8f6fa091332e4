"""Tensors of Paddle and PyTorch over our memory."""

from __future__ import annotations

import sys
import types
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle
from fastdeploy_cache.transfer_manager.kv.tensors import paddle_tensor, torch_tensor


@pytest.fixture(scope="module")
def paddle() -> Any:
    """Paddle, with its threads and signal handlers limited."""
    return import_paddle()


@pytest.mark.parametrize(
    ("dtype", "storage"), [("float32", "float32"), ("float16", "float16"), ("bfloat16", "uint16"), ("int8", "int8")]
)
def test_paddle_tensors_share_memory(paddle: Any, dtype: str, storage: str) -> None:
    """What one side writes the other reads, as elements of the layout's dtype."""
    array = np.zeros((2, 3), storage)
    found = paddle_tensor(array)
    assert found.dtype == getattr(paddle, dtype) and found.shape == [2, 3]
    array[1, 2] = 0x3F80 if dtype == "bfloat16" else 1  # one
    assert found.astype("float32").numpy().tolist() == [[0, 0, 0], [0, 0, 1]]
    found[0, 0] = 1
    assert array[0, 0] == array[1, 2] and np.count_nonzero(array) == 2


@pytest.mark.parametrize(
    ("dtype", "storage", "one"),
    [
        ("float32", "float32", 1),
        ("float16", "float16", 1),
        ("bfloat16", "uint16", 0x3F80),
        ("float8_e4m3", "uint8", 0x38),
        ("float8_e5m2", "uint8", 0x3C),
        ("int8", "int8", 1),
        ("uint8", "uint8", 1),
        ("int4", "uint8", 1),
    ],
)
def test_torch_tensors_share_memory(dtype: str, storage: str, one: int) -> None:
    """What one side writes the other reads, as elements of the layout's dtype, float8 among them."""
    torch = pytest.importorskip("torch", reason="PyTorch is an extra, and not installed here")
    array = np.zeros((2, 3), storage)
    found = torch_tensor(array, dtype)
    assert found.dtype == getattr(torch, {"float8_e4m3": "float8_e4m3fn", "int4": "uint8"}.get(dtype, dtype))
    array[1, 2] = one
    assert found.float().tolist() == [[0, 0, 0], [0, 0, 1]]
    found[0] = found[1].clone()
    assert array.tolist() == [[0, 0, one], [0, 0, one]]


def test_a_missing_framework_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """LayoutError with the extra to install."""
    for name in ("paddle", "torch"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LayoutError, match=r"cannot import paddle .*pip install 'fastdeploy-cache\[paddle\]'"):
        paddle_tensor(np.zeros(3))
    with pytest.raises(LayoutError, match=r"cannot import torch .*pip install 'fastdeploy-cache\[torch\]'"):
        torch_tensor(np.zeros(3), "float32")


def test_a_paddle_that_copies_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor over other memory than ours would read zeros for ever: LayoutError with the version."""
    copies = types.SimpleNamespace(data_ptr=lambda: 1)
    old = types.SimpleNamespace(__version__="2.6", from_dlpack=lambda array: copies)
    monkeypatch.setitem(sys.modules, "paddle", old)
    with pytest.raises(LayoutError, match=r"paddle 2\.6 copies instead of sharing memory"):
        paddle_tensor(np.zeros(3))
