"""Our settings, made of vLLM's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.adapters.vllm.needs import check_needs
from fastdeploy_cache.adapters.vllm.sequences import kv_format_of
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.parts import STORAGE_DTYPES

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig

_OURS = ("block_size", "num_gpu_blocks", "gpu_memory_bytes", "layout")  # they follow from the model


@dataclass(frozen=True)
class ConnectorSettings:
    """`cache` is what the manager is made of; `kv_format` names what a block's bytes mean, as far as is known here."""

    cache: CacheConfig
    layerwise_load: bool
    kv_format: str
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
    spec = kv_cache_config.kv_cache_groups[0].kv_cache_spec
    extra = dict(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
    layerwise_load, path = is_layerwise(extra), extra.pop("config_path", None)
    extra.pop("layerwise_load", None)
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
        layout=_layout_of(spec, len(kv_cache_config.kv_cache_groups[0].layer_names)),
        **extra,
    )
    if config.pool_sizes()[1] < 1:
        raise ConfigError("no CPU tier to load from; give num_cpu_blocks or cpu_memory_bytes")
    return ConnectorSettings(config, layerwise_load, kv_format_of(vllm_config, spec), metrics)


def _layout_of(spec: FullAttentionSpec, num_layers: int) -> KVLayout:
    """A block of a layer is one piece of memory in vLLM, keys and values together: one part, one row for each token."""
    dtype = str(spec.dtype).removeprefix("torch.")
    item_bytes = spec.dtype.itemsize
    if dtype not in STORAGE_DTYPES:
        dtype, item_bytes = "uint8", 1
    row_bytes, rest = divmod(spec.page_size_bytes, spec.block_size)
    if rest or row_bytes % item_bytes:
        raise ConfigError(f"a block of {spec.page_size_bytes} bytes has no whole rows for {spec.block_size} tokens")
    return KVLayout(
        num_layers=num_layers, num_kv_heads=1, head_dim=row_bytes // item_bytes, dtype=dtype, value_head_dim=0
    )
