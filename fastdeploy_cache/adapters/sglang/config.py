"""SGLang's settings of its hierarchical cache, as a configuration of ours."""

from __future__ import annotations

import logging
from typing import Any

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.manager import PrefixCacheManager
from fastdeploy_cache.policies.whole_runs import whole_runs
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient

logger = logging.getLogger(__name__)

_LAYOUTS = ("layer_first", "page_first", "page_first_direct", "page_head")
_IO_BACKENDS = ("kernel", "direct", "kernel_ascend")
_SELECTIVE_USES = 3


def new_config(
    num_tokens: int,
    page_size: int = 1,
    *,
    hicache_ratio: float = 2.0,
    hicache_size: int = 0,
    hicache_write_policy: str = "write_through",
    hicache_io_backend: str = "kernel",
    hicache_mem_layout: str = "layer_first",
    hicache_storage_prefetch_policy: str = "best_effort",
    prefetch_threshold: int = 256,
    **settings: Any,
) -> CacheConfig:
    """A configuration by SGLang's names; `settings`: further ones of `CacheConfig` (layout, storage, ...).

    `hicache_size` is in GB for each rank, and wins over the ratio; the ratio may be 0 for no CPU tier. Layout and IO
    backend are accepted and change nothing: in the CPU tier a block is always one piece, all layers of a page together.

    Raises:
        ConfigError: an unknown value.
    """
    for name, value, known in (
        ("hicache_io_backend", hicache_io_backend, _IO_BACKENDS),
        ("hicache_mem_layout", hicache_mem_layout, _LAYOUTS),
    ):
        if value not in known:
            raise ConfigError(f"{name} is {value!r}; use one of {', '.join(known)}")
    if (hicache_io_backend, hicache_mem_layout) == ("direct", "page_first"):
        logger.warning("event=hicache_layout asked=page_first io_backend=direct used=layer_first")
    if page_size < 1 or num_tokens < page_size:
        raise ConfigError(f"{num_tokens} tokens in pages of {page_size}; give at least a page of 1 or more")
    host: dict[str, Any] = {"cpu_to_gpu_ratio": hicache_ratio}
    if hicache_size:
        host = {"cpu_memory_bytes": hicache_size * 10**9}
    return CacheConfig(
        **{
            "block_size": page_size,
            "num_gpu_blocks": num_tokens // page_size,
            "cpu_write_policy": hicache_write_policy,
            "cpu_write_min_uses": _SELECTIVE_USES,
            "prefetch_policy": hicache_storage_prefetch_policy,
            "min_prefetch_tokens": max(prefetch_threshold, page_size),
            **host,
            **settings,
        }
    ).check_uniform("the radix cache of SGLang")


def new_manager(config: CacheConfig, *, client: TransferClient | None = None) -> PrefixCacheManager:
    """A manager for `HiRadixCache`, which evicts whole nodes, in the order of `config.eviction_policy`.

    Raises:
        ConfigError: that policy has no order of nodes (`reuse`).
    """
    return PrefixCacheManager(config, client=client, policy=whole_runs(config.eviction_policy, SYSTEM_CLOCK.now))
