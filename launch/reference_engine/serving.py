"""The model, the cache and the engine put together."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.engine import Engine, EngineSettings
from fastdeploy_cache.launch.reference_engine.model import Llama
from fastdeploy_cache.launch.reference_engine.paged_kv import KVShard
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec

logger = logging.getLogger(__name__)

MAX_RUNNING = 4  # answers at a time


def layout_of(spec: ModelSpec) -> KVLayout:
    """What the model keeps per token: float32, since Paddle computes attention on the CPU in nothing else."""
    return KVLayout(num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim, dtype="float32")


def cpu_shard(cache: PrefixCacheManager, rank: int) -> KVShard:
    """The rank's KV arrays, which the model reads and writes where they are."""
    layers = cache.ranks.kv_views(rank)
    states = {number: layer["state"] for number, layer in enumerate(layers) if "state" in layer}
    return KVShard([layer.get("key") for layer in layers], [layer.get("value") for layer in layers], states=states)


@contextlib.contextmanager
def running_engine(
    files: ModelFiles, config: CacheConfig, max_running: int = MAX_RUNNING, *, recompute_not_received: bool = True
) -> Iterator[Engine]:
    """An engine that holds all ranks' shards in one process.

    Its KV arrays are views on the ranks' shared memory or, with the device `cuda`, on the GPU of rank 0.
    """
    on_gpu = config.transfer.device == "cuda"
    engines: list[Engine] = []

    def end(rank: int) -> None:
        """The model's arrays were the rank's, and are gone."""
        logger.error("event=kv_lost rank=%d action=stop", rank)
        for each in engines:
            each.stop()

    with PrefixCacheManager(config, on_kv_lost=end) as cache:
        if on_gpu:
            from fastdeploy_cache.launch.reference_engine.gpu_kv import gpu_shard

            shards = [gpu_shard(cache, rank) for rank in range(config.transfer.tp_size)]
        else:
            shards = [cpu_shard(cache, rank) for rank in range(config.transfer.tp_size)]
        is_hybrid = config.layout is not None and bool(config.layout.groups)
        model = Llama(files, shards, config.transfer.device_id(0) if on_gpu else None, is_hybrid=is_hybrid)
        engine = Engine(
            cache,
            model,
            EngineSettings(
                eos_token_id=files.spec.eos_token_id,
                context_length=files.spec.context_length,
                max_running=max_running,
                overlap=not is_hybrid,
                recompute_not_received=recompute_not_received,
            ),
        )
        engines.append(engine)
        yield engine
