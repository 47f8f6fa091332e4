"""What GET /status of a server says."""

from __future__ import annotations

import dataclasses
from typing import Any

from fastdeploy_cache import CacheStats, PrefixCacheManager
from fastdeploy_cache.policies.breaker import BreakerState


def status_of(cache: PrefixCacheManager) -> dict[str, Any]:
    """What `/status` answers, for JSON. Any thread."""
    stats = cache.stats()
    return {
        "role": cache.config.role,
        "life_cycle": cache.life.status.value,
        "ranks": [dataclasses.asdict(status) for status in stats.ranks],
        "tiers": {"gpu": stats.gpu.by_state(), "cpu": stats.cpu.by_state()},
        "storage": _storage_status(stats),
        "peers": _peer_status(cache) if cache.config.peer is not None else None,
        "hit_rates": dict(stats.hit_rates),
        "missed_tokens": dict(stats.missed_tokens),
        "saved_seconds": dict(stats.saved_seconds),
        "requests": stats.num_requests,
        "transfers_in_flight": stats.num_transfers_in_flight,
        "open_sends": stats.num_open_sends,
        "open_receives": stats.num_open_receives,
    }


def _storage_status(stats: CacheStats) -> dict[str, Any] | None:
    if stats.storage is None:
        return None
    counts = stats.storage_counts()
    return {
        "available": counts.is_up,
        "breakers": {operation: BreakerState(state).name.lower() for operation, state in counts.breakers.items()},
        "blocks": dict(counts.blocks),
        "lost_objects": dict(counts.objects),
        "full_disks": counts.num_full_disks,
    }


def _peer_status(cache: PrefixCacheManager) -> list[dict[str, Any]]:
    """One entry for each kind and peer, of what the metrics count. Of who asked for nothing no name is known."""
    peers: dict[tuple[str, str], dict[str, Any]] = {}
    for family in cache.metrics.collect():
        name = family.name.removeprefix("fastdeploy_cache_peer_")
        for sample in family.samples:
            if name == family.name or "kind" not in sample.labels or not sample.value:
                continue
            entry = peers.setdefault((sample.labels["kind"], sample.labels["peer"]), {"failures": {}})
            if name == "failures":
                entry["failures"][sample.labels["reason"]] = int(sample.value)
            else:
                entry[name] = sample.value
    return [{"kind": kind, "peer": peer, **entry} for (kind, peer), entry in sorted(peers.items())]
