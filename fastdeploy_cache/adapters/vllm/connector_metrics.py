"""The connector's numbers in vLLM's own types: its log line, its page of metrics, its hits by source."""

from __future__ import annotations

from collections import Counter as Sum
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # before 0.32, which does not ask for sources
    CacheHitSource = None

from fastdeploy_cache.adapters.vllm.counters import MEANINGS
from fastdeploy_cache.adapters.vllm.sequences import ExternalHit
from fastdeploy_cache.config.cache import CacheConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class ConnectorStats(KVConnectorStats):  # type: ignore[misc]  # vLLM is not there where types are checked
    """Counts of an interval, by the names of `MEANINGS`."""

    def reset(self) -> None:
        """Begin a new interval."""
        self.data: dict[str, float] = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Both intervals together."""
        sums = Sum(self.data)
        sums.update(other.data)
        return ConnectorStats(data=dict(sums))

    def reduce(self) -> dict[str, int | float]:
        """What vLLM's log shows of the interval."""
        return {name: round(value, 3) for name, value in self.data.items()}

    def is_empty(self) -> bool:
        """Nothing has happened."""
        return not self.data


class ConnectorCounters(KVConnectorPromMetrics):  # type: ignore[misc]
    """`vllm:fastdeploy_cache_NAME_total` on vLLM's page, for each of `MEANINGS`, with vLLM's labels."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """All series exist from the start, at zero."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        new_counter = metric_types[Counter]
        counters = {
            name: new_counter(name=f"vllm:fastdeploy_cache_{name}", documentation=meaning, labelnames=labelnames)
            for name, meaning in MEANINGS.items()
        }
        self._counters = {
            engine: {name: counter.labels(*values) for name, counter in counters.items()}
            for engine, values in per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add an interval's counts."""
        for name, value in transfer_stats_data.items():
            self._counters[engine_idx][name].inc(value)


def storage_source(config: CacheConfig) -> Any:
    """What vLLM calls the configured store; None where there is none, or vLLM does not ask."""
    if CacheHitSource is None or config.storage is None:
        return None
    return CacheHitSource.DISK if config.storage.kind == "file" else CacheHitSource.EXTERNAL_UNSPECIFIED


def hits_by_source(hit: ExternalHit, storage: Any) -> dict[Any, int]:
    """Tokens by vLLM's sources; without those that are zero."""
    counts = {CacheHitSource.HOST: hit.num_cpu_tokens, storage: hit.num_storage_tokens}
    return {source: num_tokens for source, num_tokens in counts.items() if num_tokens}
