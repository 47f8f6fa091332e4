"""The model, the cache and the engine put together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager
from launch.reference_engine.engine import Engine
from launch.reference_engine.model import KVShard, Llama
from launch.reference_engine.weights import ModelFiles, ModelSpec


def layout_of(spec: ModelSpec) -> KVLayout:
    """What the model keeps per token: float32, since Paddle computes attention on the CPU in nothing else."""
    return KVLayout(num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype="float32")


@contextlib.contextmanager
def running_engine(files: ModelFiles, config: CacheConfig, max_running: int = 4) -> Iterator[Engine]:
    """An engine whose KV arrays are views on the ranks' shared memory; one compute process holds all shards."""
    with PrefixCacheManager(config) as cache:
        shards = []
        for rank in range(config.transfer.tp_size):
            layers = cache.kv_views(rank)
            shards.append(KVShard([layer["key"] for layer in layers], [layer["value"] for layer in layers]))
        model = Llama(files, shards)
        yield Engine(
            cache,
            model,
            eos_token_id=files.spec.eos_token_id,
            context_length=files.spec.context_length,
            max_running=max_running,
        )
