"""The tensors of the report's section on PyTorch, as far as they go without a GPU; CI runs this beside vLLM."""

from __future__ import annotations

import numpy as np
import pytest

from fastdeploy_cache.launch.gpu import torch_arrays
from fastdeploy_cache.transfer_manager.kv.tensors import array_places


@pytest.mark.processes
@pytest.mark.parametrize(("order", "stride"), [("apart", 1), ("part first", 1), ("block first", 2)])
def test_what_is_written_is_read(monkeypatch: pytest.MonkeyPatch, order: str, stride: int) -> None:
    """In each shape the images come back, and the arrays fit the layout, their blocks as far apart as they are."""
    torch = pytest.importorskip("torch", reason="needs PyTorch; CI runs this in vLLM's environment")
    monkeypatch.setattr(torch_arrays, "_DEVICE", "cpu")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    arrays, layout = torch_arrays.TorchArrays(order, 5), torch_arrays._LAYOUT
    images = np.random.default_rng(1).integers(0, 256, (5, layout.block_bytes), dtype=np.uint8)
    arrays.write(images)
    assert np.array_equal(arrays.read(), images)
    places = array_places(layout, arrays.layers)
    assert {place.strides_bytes[0] for layer in places for place in layer} == {stride * layout.parts[0].num_bytes}
