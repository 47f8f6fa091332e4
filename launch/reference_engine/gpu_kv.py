"""KV arrays of the model on an NVIDIA GPU, made by the model's process or by the ranks."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import ModelLoadError
from fastdeploy_cache.launch.reference_engine.paddle_runtime import import_paddle
from fastdeploy_cache.launch.reference_engine.paged_kv import KVShard
from fastdeploy_cache.transfer_manager.device.cuda import export_kv, open_segment
from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda
from fastdeploy_cache.transfer_manager.kv.dlpack import MemoryArray
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.parts import KVPart
from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace


def gpu_shard(cache: PrefixCacheManager, rank: int) -> KVShard:
    """One rank's arrays as Paddle tensors of rows [blocks * block_size * heads, head_dim], known to its rank process.

    With `kv_owner = "worker"` they are made here and attached; with `"transfer"` the rank has made them.

    Raises:
        ModelLoadError: this Paddle has no CUDA.
        DeviceError, LayoutError: bindings, driver or device are missing, or the arrays cannot be shared.
        RankStartError: the rank cannot attach them.
    """
    config = cache.config
    Cuda(config.transfer.device_id(rank))  # says what is missing
    if not import_paddle().is_compiled_with_cuda():
        raise ModelLoadError("this Paddle computes on the CPU only; install paddlepaddle-gpu for --device gpu:N")
    layout, device_id = config.rank_layout(), config.transfer.device_id(rank)
    assert layout is not None
    if config.transfer.owner_of_kv == "worker":
        tensors = _new_tensors(layout, config.pool_sizes()[0], device_id)
        places = [
            {name: _place(layout, name, tensor, device_id) for name, tensor in layer.items()} for layer in tensors
        ]
        cache.ranks.attach_kv(rank, export_kv(layout, places, device_id))
    else:
        tensors = _opened_tensors(cache, rank, layout, device_id)
    num_blocks = config.pool_sizes()[0]
    keys, values = ([layer[name] for layer in tensors] for name in ("key", "value"))
    return KVShard(keys, values, num_blocks=num_blocks, block_size=config.block_size)


def _rows(part: KVPart, num_blocks: int) -> list[int]:
    block_size, heads, head_dim = part.shape
    return [num_blocks * block_size * heads, head_dim]


def _part(layout: RankLayout, name: str) -> KVPart:
    return next(part for part in layout.parts if part.name == name)


def _new_tensors(layout: RankLayout, num_blocks: int, device_id: int) -> list[dict[str, Any]]:
    paddle = import_paddle()
    paddle.set_device(f"gpu:{device_id}")
    return [
        {part.name: paddle.zeros(_rows(part, num_blocks), part.dtype) for part in layout.parts}
        for _ in range(layout.num_layers)
    ]


def _place(layout: RankLayout, name: str, tensor: Any, device_id: int) -> ArrayPlace:
    """The rows of a tensor, seen block by block."""
    block_bytes = _part(layout, name).num_bytes
    item_bytes = tensor.element_size()
    num_items = block_bytes // item_bytes
    return ArrayPlace(
        address=tensor.data_ptr(),
        shape=(tensor.shape[0] * tensor.shape[1] // num_items, num_items),
        strides_bytes=(block_bytes, item_bytes),
        item_bytes=item_bytes,
        device="cuda",
        device_id=device_id,
    )


def _opened_tensors(cache: PrefixCacheManager, rank: int, layout: RankLayout, device_id: int) -> list[dict[str, Any]]:
    paddle, handle, cuda = import_paddle(), cache.ranks.kv_handle(rank), Cuda(device_id)
    bases = [open_segment(cuda, segment) for segment in handle.segments]
    return [
        {
            part.name: paddle.from_dlpack(
                MemoryArray(
                    bases[place.segment] + place.offset_bytes,
                    _rows(part, place.num_blocks),
                    part.dtype,
                    device="cuda",
                    device_id=device_id,
                    owner=cuda,
                )
            )
            for part, place in zip(layout.parts, in_layer, strict=True)
        }
        for in_layer in handle.places
    ]
