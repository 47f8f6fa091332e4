"""The one line that a worker of FastDeploy needs where blocks are copied: it hands its KV arrays to the engine's cache.

docs/adapters/fastdeploy.md says where the line goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle

_DTYPES = {"float8_e4m3fn": "float8_e4m3"}


def hand_over_kv(caches: Sequence[Any], num_layers: int, rank: int, port: int | str) -> None:
    """Hand over a rank's KV arrays on the GPU: from now on the cache copies blocks from them and into them.

    `caches`: a key and a value tensor for each layer, [blocks, heads, tokens, elements], as `initialize_kv_cache` lists
    them. `port`: `parallel_config.local_engine_worker_queue_port`. The worker keeps the tensors.

    Raises:
        LayoutError: other tensors, such as latent ones or with scales. DeviceError: the driver does not share them.
        IPCError: no engine takes them.
    """
    from fastdeploy_cache.adapters.fastdeploy.kv_arrivals import send_kv

    send_kv(port, rank, _handle_of(caches, num_layers))


def _handle_of(caches: Sequence[Any], num_layers: int) -> KVHandle:
    from fastdeploy_cache.transfer_manager.device.cuda import export_kv
    from fastdeploy_cache.transfer_manager.kv.tensors import ArrayPlace

    layout, places = layout_of(caches, num_layers), [ArrayPlace.of(cache) for cache in caches]
    layers = [{"key": key, "value": value} for key, value in zip(places[::2], places[1::2], strict=True)]
    _, _, num_tokens, _ = caches[0].shape
    return export_kv(layout.for_rank(1, num_tokens), layers, places[0].device_id)


def layout_of(caches: Sequence[Any], num_layers: int) -> KVLayout:
    """The layout of one rank's tensors.

    Raises:
        LayoutError: they are not a key and a value of one shape for each layer.
    """
    shapes = {tuple(cache.shape) for cache in caches}
    if len(caches) != 2 * num_layers or len(shapes) != 1 or len(caches[0].shape) != 4:
        what = f"{num_layers} layers with {len(caches)} tensors of the shapes {sorted(shapes)}"
        raise LayoutError(f"{what}; hand_over_kv takes a key and a value of one shape for each layer")
    (_, num_heads, _, head_dim), dtype = shapes.pop(), str(caches[0].dtype).rpartition(".")[2]
    return KVLayout(
        num_layers=num_layers,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        dtype=_DTYPES.get(dtype, dtype),
        heads_first=True,
    )
