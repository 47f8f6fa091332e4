"""What the doctor can go by where it sees a page of metrics only: sums since the start of the manager."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.errors import MetricsError
from fastdeploy_cache.insight.doctor.evidence import Evidence
from fastdeploy_cache.insight.doctor.process_troubles import ProcessTrouble
from fastdeploy_cache.insight.what_if.what_if import WhatIfRate
from fastdeploy_cache.metrics.page_samples import Sample, samples_of
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.requests.explanation import Miss
from fastdeploy_cache.transfer_manager.client import ProcessHealth

_PREFIX = "fastdeploy_cache_"
_STATES = dict(enumerate(ProcessHealth))
_CAUSES = {cause.value: cause for cause in Cause}


def evidence_in_metrics(text: str) -> dict[str, Evidence]:
    """What a page of metrics shows of each cache on it, by its data-parallel id.

    A page knows neither prompts nor the details of single requests: what needs these is not found by it.

    Raises:
        MetricsError: no page of metrics, or none of this cache's.
    """
    by_cache: dict[str, list[Sample]] = {}
    for sample in samples_of(text):
        if sample.name.startswith(_PREFIX) and "dp" in sample.labels:
            by_cache.setdefault(sample.labels["dp"], []).append(sample)
    found = {name: _Page(samples).evidence() for name, samples in by_cache.items()}
    if not found:
        raise MetricsError("the page has no metrics of a cache; give the one that serve_metrics returned")
    return found


class _Page:
    """The samples of one cache."""

    def __init__(self, samples: list[Sample]) -> None:
        self._samples = samples

    def evidence(self) -> Evidence:
        sizes = {tier: int(sum(value for _, value in self._all("blocks", tier=tier))) for tier in ("gpu", "cpu")}
        labels, _ = next(iter(self._all("config_info")), ({}, 0.0))
        num_bytes, seconds = (self._sum(f"task_{what}_total", kind="swap_in") for what in ("bytes", "seconds"))
        states = {labels["operation"]: state for labels, state in self._all("storage_breaker_state")}
        return Evidence(
            num_requests=int(self._sum("requests_total")),
            num_tokens=int(self._sum("tokens_queried_total")),
            misses=list(self._misses("cpu" if sizes["cpu"] else "gpu")),
            block_size=int(labels.get("block_size", 0)),
            policy=labels.get("eviction_policy", ""),
            num_gpu_blocks=sizes["gpu"],
            num_cpu_blocks=sizes["cpu"],
            troubles=list(self._troubles()),
            num_full_disks=int(self._sum("storage_disk_full")),
            broken_operations=[name for name, state in states.items() if state == BreakerState.OPEN],
            rates=list(self._rates(sizes)),
            load_bytes_per_second=num_bytes / seconds if seconds else None,
        )

    def _troubles(self) -> Iterator[ProcessTrouble]:
        for labels, number in self._all("process_state"):
            state = _STATES.get(int(number))
            if state not in (None, ProcessHealth.READY, ProcessHealth.PARKED):
                yield ProcessTrouble(labels["process"], int(labels["rank"]), state)

    def _misses(self, last_tier: str) -> Iterator[Miss]:
        """What was evicted is taken for lost from the last tier that there is."""
        for labels, value in self._all("tokens_missed_total"):
            cause = _CAUSES.get(labels["cause"])  # another version may have others
            if cause is not None and value:
                yield Miss(cause=cause, num_tokens=int(value), tier=last_tier if cause is Cause.EVICTED else None)

    def _rates(self, sizes: Mapping[str, int]) -> Iterator[WhatIfRate]:
        saved = {
            (labels["tier"], labels["factor"], labels["policy"]): value
            for labels, value in self._all("what_if_saved_seconds")
        }
        for labels, value in self._all("what_if_hit_rate"):
            tier, factor = labels["tier"], float(labels["factor"])
            yield WhatIfRate(
                tier=tier,
                factor=factor,
                policy=labels["policy"],
                num_blocks=round((sizes[tier] or sizes["gpu"]) * factor),
                token_hit_rate=value,
                saved_seconds=saved.get((tier, labels["factor"], labels["policy"])),
            )

    def _sum(self, name: str, **wanted: str) -> float:
        return sum(value for _, value in self._all(name, **wanted))

    def _all(self, name: str, **wanted: str) -> list[tuple[Mapping[str, str], float]]:
        return [
            (sample.labels, sample.value)
            for sample in self._samples
            if sample.name == _PREFIX + name and wanted.items() <= sample.labels.items()
        ]
