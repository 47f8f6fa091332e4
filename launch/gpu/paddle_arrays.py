"""Section: KV arrays that are tensors of Paddle on the GPU."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.gpu.arrays import rows_of, there_and_back
from fastdeploy_cache.launch.gpu.gpu_memory import Bytes
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle
from fastdeploy_cache.transfer_manager.device.cuda import export_kv
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle

_LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=64, dtype="float16", heads_first=True).for_rank(1, 16)


class PaddleArrays:
    """`WorkerArrays` of Paddle's allocator: FastDeploy's [blocks, heads, tokens, elements]."""

    def __init__(self, num_blocks: int) -> None:
        self._paddle, self.num_blocks = import_paddle(), num_blocks
        self._paddle.set_device("gpu:0")
        shape = [num_blocks, *_LAYOUT.parts[0].shape]
        self.layers: list[dict[str, Any]] = [
            {part.name: self._paddle.zeros(shape, "float16") for part in _LAYOUT.parts}
            for _ in range(_LAYOUT.num_layers)
        ]

    def handle(self) -> KVHandle:
        self._paddle.device.synchronize()
        return export_kv(_LAYOUT, self.layers, 0)

    def write(self, images: Bytes) -> None:
        for tensor, row in rows_of(self.layers, images):
            address = tensor.data_ptr()
            tensor.set_value(row.view(np.float16).reshape(tensor.shape))
            if tensor.data_ptr() != address:
                raise LaunchError("Paddle's set_value has moved the tensor; this section needs another way to write")
        self._paddle.device.synchronize()

    def read(self) -> Bytes:
        arrays = [tensor.numpy() for layer in self.layers for tensor in layer.values()]
        return np.concatenate([array.reshape(self.num_blocks, -1).view(np.uint8) for array in arrays], axis=1)


def run(notes: Notes, options: GpuOptions) -> None:  # noqa: ARG001
    """There and back, with small arrays and with larger ones."""
    paddle = import_paddle()
    if not paddle.is_compiled_with_cuda():
        notes.skip("Paddle", f"Paddle {paddle.__version__} is built for the CPU only; paddlepaddle-gpu is needed")
        return
    notes.note("Paddle", f"{paddle.__version__} for CUDA {paddle.version.cuda()}")
    for num_blocks in (48, 256):
        what = f"[blocks, heads, tokens, elements], {num_blocks} blocks"
        notes.check(what, partial(_check, num_blocks))


def _check(num_blocks: int) -> str:
    return there_and_back(_LAYOUT, PaddleArrays(num_blocks))
