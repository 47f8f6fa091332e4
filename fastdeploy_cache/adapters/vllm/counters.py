"""What the manager has counted, in steps from one question to the next: vLLM adds such steps up itself."""

from __future__ import annotations

from collections.abc import Mapping

from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.metrics.request_counts import TIERS

MEANINGS: Mapping[str, str] = {
    "cpu_hit_tokens": "Prompt tokens loaded from the CPU tier",
    "storage_hit_tokens": "Prompt tokens loaded from storage",
    "loaded_bytes": "Bytes copied from the CPU tier into vLLM's blocks, on all ranks",
    "load_seconds": "Time that ranks spent on these copies",
    "stored_bytes": "Bytes copied from vLLM's blocks to the CPU tier, on all ranks",
    "store_seconds": "Time that ranks spent on these copies",
    "failed_loads": "Ranks' parts of loads that failed; vLLM computes what they were to bring",
    "failed_stores": "Ranks' parts of copies to the CPU tier that failed",
}


class Counters:
    """One for each manager. One thread at a time."""

    def __init__(self, metrics: CacheMetrics) -> None:
        self._metrics = metrics
        self._last = dict.fromkeys(MEANINGS, 0.0)

    def take(self) -> dict[str, float]:
        """What has been added since the last call, by the names of `MEANINGS`; what is zero is left out."""
        now = self._read()
        added = {name: now[name] - self._last[name] for name in now if now[name] != self._last[name]}
        self._last = now
        return added

    def _read(self) -> dict[str, float]:
        hits = dict(zip(TIERS, self._metrics.token_counts()[1], strict=True))
        loads, stores = (self._metrics.task_totals(kind) for kind in ("swap_in", "swap_out"))
        return {
            "cpu_hit_tokens": hits["cpu"],
            "storage_hit_tokens": hits["storage"],
            "loaded_bytes": loads.num_bytes,
            "load_seconds": loads.seconds,
            "stored_bytes": stores.num_bytes,
            "store_seconds": stores.seconds,
            "failed_loads": loads.num_failures,
            "failed_stores": stores.num_failures,
        }
