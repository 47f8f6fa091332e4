"""Our settings, made of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from fastdeploy_cache.adapters.vllm.groups import GroupMap, layer_order, layout_of
from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.adapters.vllm.needs import check_needs
from fastdeploy_cache.adapters.vllm.sequences import kv_format_of
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

_OURS = ("block_size", "num_gpu_blocks", "gpu_memory_bytes", "num_gpu_units", "layout")  # they follow from the model


@dataclass(frozen=True)
class ConnectorSettings:
    """`cache` is what the manager is made of; `kv_format` names what a block's bytes mean, as far as is known here."""

    cache: CacheConfig
    layerwise_load: bool
    kv_format: str
    groups: GroupMap
    layer_names: tuple[str, ...] = ()  # with several groups: in the order of the layout's layers
    metrics: MetricsAddress | None = None


def is_layerwise(extra: Mapping[str, Any]) -> bool:
    """The connector's own option: wait for each layer inside the step, instead of loading between steps."""
    value = extra.get("layerwise_load", False)
    if not isinstance(value, bool):
        raise ConfigError(f"layerwise_load is {value!r}; use true or false")
    return value


def settings_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> ConnectorSettings:
    """The same in every process of an engine.

    Raises:
        ConfigError: a model or a parallelism that cannot be served, or an impossible setting.
    """
    check_needs(vllm_config, kv_cache_config)
    groups = kv_cache_config.kv_cache_groups
    map_ = GroupMap.of(groups)
    spec = groups[map_.full].kv_cache_spec
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    layerwise_load, path = is_layerwise(extra), extra.pop("config_path", None)
    extra.pop("layerwise_load", None)
    if layerwise_load and map_.rows:
        raise ConfigError(
            f"layerwise_load is true, and the model has {len(groups)} KV cache groups: inside a step vLLM cannot be "
            "told that a load has failed; leave it out, or start vLLM with --disable-hybrid-kv-cache-manager"
        )
    parallel = vllm_config.parallel_config
    metrics = MetricsAddress.take(extra, parallel.data_parallel_index)
    if taken := [name for name in _OURS if name in extra]:
        raise ConfigError(
            f"kv_connector_extra_config sets {', '.join(taken)}; the connector takes these from the model"
        )
    extra["transfer"] = {
        "device": "cuda" if current_platform.is_cuda() else "cpu",
        "data_parallel_id": parallel.data_parallel_index,
        **extra.get("transfer", {}),
        "tp_size": parallel.tensor_parallel_size,
        "kv_owner": "worker",
    }
    config = CacheConfig.load(
        path,
        block_size=spec.block_size,
        num_gpu_blocks=kv_cache_config.num_blocks,
        num_gpu_units=(kv_cache_config.num_blocks,) * len(map_.rows),
        layout=layout_of(groups),
        **extra,
    )
    if config.pool_sizes()[1] < 1:
        raise ConfigError("no CPU tier to load from; give num_cpu_blocks or cpu_memory_bytes")
    states = [groups[number].kv_cache_spec for number in sorted(map_.states)]
    names = layer_order(name for group in groups for name in group.layer_names) if map_.rows else ()
    kv_format = kv_format_of(vllm_config, spec, states)
    return ConnectorSettings(config, layerwise_load, kv_format, map_, tuple(names), metrics)
