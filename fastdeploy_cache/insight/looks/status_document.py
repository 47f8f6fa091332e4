"""The state of a cache as one document, for `fastdeploy-cache status` and a server's `/status`."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.insight.doctor.process_troubles import troubles_of
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.stats import CacheStats


def status_document(stats: CacheStats, metrics: CacheMetrics, config: CacheConfig) -> dict[str, Any]:
    """What of it follows from the statistics and the metrics, for JSON. Any thread.

    Each of `hit_rates` is None where no request was admitted within `hit_rate_window_seconds`.
    """
    return {
        "pid": os.getpid(),
        "ranks": [dataclasses.asdict(status) for status in stats.ranks],
        "troubles": [str(trouble) for trouble in troubles_of(stats.processes)],
        "tiers": {"gpu": stats.gpu.by_state(), "cpu": stats.cpu.by_state()},
        "rows": {row.name: row.by_state() for row in stats.rows},
        "tenants": {each.label(config.block_size): each.by_tier() for each in stats.tenants},
        "storage": _storage_status(stats),
        "peers": _peer_status(metrics) if config.peer is not None else None,
        "hit_rates": dict(metrics.known_hit_rates()),
        "hit_rate_window_seconds": config.hit_rate_window_seconds,
        "missed_tokens": dict(stats.missed_tokens),
        "saved_seconds": dict(stats.saved_seconds),
        "requests": stats.num_requests,
        "transfers_in_flight": stats.num_transfers_in_flight,
        "swapped_in_blocks": stats.num_swapped_in_blocks,
        "swapped_out_blocks": stats.num_swapped_out_blocks,
        "evicted_blocks": {"gpu": stats.gpu.num_evicted, "cpu": stats.cpu.num_evicted},
        "failed_steps": dict(stats.num_failed_steps),
        "quarantined_blocks": stats.num_quarantined_blocks,
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
        "checkpoints": {
            "fetched": stats.storage.num_fetched_checkpoints,
            "written": stats.storage.num_written_checkpoints,
        },
        "lost_objects": dict(counts.objects),
        "full_disks": counts.num_full_disks,
    }


def _peer_status(metrics: CacheMetrics) -> list[dict[str, Any]]:
    """One entry for each kind and peer, of what the metrics count. Of who asked for nothing no name is known."""
    peers: dict[tuple[str, str], dict[str, Any]] = {}
    for family in metrics.collect():
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
