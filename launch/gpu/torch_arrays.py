"""Section: KV arrays that are tensors of PyTorch on the GPU, in the shapes that engines give them."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from fastdeploy_cache.errors import DeviceError, LaunchError
from fastdeploy_cache.launch.gpu.arrays import rows_of, there_and_back
from fastdeploy_cache.launch.gpu.gpu_memory import Bytes
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes
from fastdeploy_cache.transfer_manager.device.cuda import export_kv
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle

_DEVICE = "cuda:0"
_LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=64, dtype="bfloat16").for_rank(1, 16)
# Arrays of less than 1 MiB share an allocation of PyTorch's pool, larger ones have others.
_SHAPES = {
    "a tensor for each part, small": ("apart", 48),
    "a tensor for each part": ("apart", 256),
    "[2, blocks, ...] for each layer": ("part first", 256),
    "[blocks, 2, ...] for each layer": ("block first", 256),
}


class TorchArrays:
    """`WorkerArrays` of PyTorch's allocator."""

    def __init__(self, order: str, num_blocks: int) -> None:
        import torch

        self._torch, self.num_blocks = torch, num_blocks
        shape = _LAYOUT.parts[0].shape
        self.layers: list[dict[str, Any]] = []
        for _ in range(_LAYOUT.num_layers):
            if order == "apart":
                pair = [torch.zeros(num_blocks, *shape, dtype=torch.bfloat16, device=_DEVICE) for _ in range(2)]
            elif order == "part first":
                pair = list(torch.zeros(2, num_blocks, *shape, dtype=torch.bfloat16, device=_DEVICE))
            else:
                pair = list(torch.zeros(num_blocks, 2, *shape, dtype=torch.bfloat16, device=_DEVICE).unbind(1))
            self.layers.append(dict(zip(("key", "value"), pair, strict=True)))

    def handle(self) -> KVHandle:
        self._torch.cuda.synchronize()
        return export_kv(_LAYOUT, self.layers, 0)

    def write(self, images: Bytes) -> None:
        for tensor, row in rows_of(self.layers, images):
            tensor.copy_(self._torch.from_numpy(row).view(tensor.dtype).reshape(tensor.shape))
        self._torch.cuda.synchronize()

    def read(self) -> Bytes:
        tensors = [tensor for layer in self.layers for tensor in layer.values()]
        rows = [tensor.cpu().contiguous().view(self._torch.uint8).numpy() for tensor in tensors]
        return np.concatenate([row.reshape(self.num_blocks, -1) for row in rows], axis=1)


def run(notes: Notes, options: GpuOptions) -> None:  # noqa: ARG001
    """Each shape there and back, by DLPack and CUDA IPC; then memory that cannot be shared."""
    import torch

    if not torch.cuda.is_available():
        notes.skip("PyTorch", f"PyTorch {torch.__version__} (for CUDA {torch.version.cuda}) sees no GPU")
        return
    notes.note("PyTorch", f"{torch.__version__} for CUDA {torch.version.cuda}")
    for name, (order, num_blocks) in _SHAPES.items():
        notes.check(name, partial(_check, order, num_blocks))
    change = getattr(torch.cuda.memory, "_set_allocator_settings", None)
    if change is None:
        notes.skip("expandable segments", "this PyTorch cannot switch them on in a running process")
        return
    torch.cuda.empty_cache()
    change("expandable_segments:True")
    notes.check("expandable segments", _check_refusal)


def _check(order: str, num_blocks: int) -> str:
    return there_and_back(_LAYOUT, TorchArrays(order, num_blocks))


def _check_refusal() -> str:
    """Such memory has no IPC handle, and the message has to say so."""
    try:
        TorchArrays("apart", 1024).handle()
    except DeviceError as error:
        return f"refused, as they must be: {error}"
    raise LaunchError(
        "an IPC handle was given out for memory that should have none; see docs/data_plane.md of the source"
    )
