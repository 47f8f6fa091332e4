"""Our settings, made of vLLM's configuration; what cannot be served is refused here, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import FullAttentionSpec

from fastdeploy_cache.adapters.vllm.metrics_address import MetricsAddress
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.kv.layout import STORAGE_DTYPES, KVLayout

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

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
    _check_role(vllm_config)
    _check_parallelism(vllm_config)
    spec = _only_spec(kv_cache_config)
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
    kv_format = f"vllm {vllm_config.cache_config.cache_dtype} {spec.dtype} {spec.kv_quant_mode.name}"
    return ConnectorSettings(config, layerwise_load, kv_format, metrics)


def _check_role(vllm_config: VllmConfig) -> None:
    role = vllm_config.kv_transfer_config.kv_role
    if role == "kv_producer":
        raise ConfigError(
            'kv_role is "kv_producer"; vLLM does not keep the blocks of a producer until steps under way have ended, '
            'so they could be overwritten while they are stored: use "kv_both"'
        )


def _check_parallelism(vllm_config: VllmConfig) -> None:
    parallel = vllm_config.parallel_config
    for name in ("pipeline_parallel_size", "decode_context_parallel_size", "prefill_context_parallel_size"):
        if getattr(parallel, name) != 1:
            raise ConfigError(f"{name} is {getattr(parallel, name)}; this connector serves tensor parallelism only")
    if vllm_config.speculative_config is not None:
        raise ConfigError(
            "speculative decoding is on; this connector cannot store the KV of draft layers: switch it off"
        )


def _only_spec(kv_cache_config: KVCacheConfig) -> FullAttentionSpec:
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise ConfigError(
            f"the model has {len(groups)} KV cache groups; this connector serves one: start vLLM with "
            "--disable-hybrid-kv-cache-manager, if the model allows that"
        )
    spec = groups[0].kv_cache_spec
    if not isinstance(spec, FullAttentionSpec):
        raise ConfigError(f"the KV cache is a {type(spec).__name__}; this connector serves full attention and MLA")
    if spec.page_size_padded not in {None, spec.unpadded_page_size_bytes} or spec.tokens_per_state != 1:
        raise ConfigError(
            f"a block of {spec.page_size_bytes} bytes holds {spec.unpadded_page_size_bytes} bytes of "
            f"{spec.tokens_per_state} tokens a state; this connector serves unpadded blocks of one state a token"
        )
    return spec


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
