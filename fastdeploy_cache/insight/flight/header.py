"""What a flight recording says of its cache before the first record: all that a replay needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.config.tenants import tier_tenants

# Settings that decide what is found, loaded, copied down and evicted. No folder, address, name or secret is one.
_DECIDING: Final = (
    *("block_size", "eviction_policy", "eviction_history_bytes", "cpu_write_policy", "cpu_write_high_water"),
    *("cpu_write_min_uses", "cache_outputs", "storage_write_policy", "storage_write_min_uses", "prefetch_policy"),
    *("min_prefetch_tokens", "max_prefetch_share", "load_policy", "prefill_tokens_per_second", "min_load_tokens"),
    *("max_load_share", "recompute_last_token", "enable_prefix_caching"),
)
_OF_ROWS: Final = ("checkpoint_every_tokens", "checkpoints_per_path", "state_copy")  # of a hybrid model alone
RECORDED_SETTINGS: Final = frozenset(
    {*_DECIDING, *_OF_ROWS, "num_gpu_blocks", "num_cpu_blocks", "num_gpu_units", "layout"}
)


def has_rows(header: Mapping[str, Any]) -> bool:
    """Whether it is of a hybrid model: its records tell of snapshots and checkpoints, too."""
    return "num_gpu_units" in header.get("settings", {})


def header_of(
    config: CacheConfig, *, reason: str, clock_seconds: float, unix_seconds: float, num_dropped: int
) -> dict[str, Any]:
    """`reason`: why it is written. `num_dropped`: whether, and about how much, there was before the first record."""
    num_gpu_blocks, num_cpu_blocks = config.pool_sizes()
    settings = {name: getattr(config, name) for name in _DECIDING}
    settings |= {"num_gpu_blocks": num_gpu_blocks, "num_cpu_blocks": num_cpu_blocks}
    if config.layout is not None:
        settings["layout"] = layout = dataclasses.asdict(config.layout)
        ranks = config.rank_layout()
        if not layout["groups"]:  # it is left out as before there were groups
            del layout["groups"]
        elif ranks is not None:
            settings |= {name: getattr(config, name) for name in _OF_ROWS}
            settings["num_gpu_units"] = list(ranks.num_units)
    num_tenants = len(tier_tenants(config.tenants))
    of_tenants = {"num_tenants": num_tenants} if num_tenants else {}
    return {
        "settings": settings,
        "num_ranks": config.transfer.tp_size,
        "has_storage": config.storage is not None,
        "has_peers": config.peer is not None,
        "reason": reason,
        "clock_seconds": clock_seconds,  # the clock of the records, at the time below
        "unix_seconds": unix_seconds,
        "num_dropped": num_dropped,
        **of_tenants,
    }
