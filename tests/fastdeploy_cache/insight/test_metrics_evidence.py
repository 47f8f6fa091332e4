"""The doctor over a page of metrics finds what it finds over the manager, as far as sums show it."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from fastdeploy_cache.errors import MetricsError
from fastdeploy_cache.insight.doctor.doctor import examine
from fastdeploy_cache.insight.doctor.metrics_evidence import evidence_in_metrics
from tests.rigs.asker import Asker
from tests.rigs.sick_caches import SICK, rounds

NOT_IN_SUMS = {name for name in SICK if "differ" in name} | {"never_committed"}


def page_of(asker: Asker) -> str:
    registry = CollectorRegistry()
    registry.register(asker.cache.metrics)
    return generate_latest(registry).decode()


@pytest.mark.parametrize("name", sorted(SICK.keys() - NOT_IN_SUMS))
def test_the_planted_cause_comes_first(name: str) -> None:
    """For each sick set-up whose cause is a sum."""
    case = evidence_in_metrics(page_of(SICK[name][0]()))["0"]
    findings = examine(case)
    assert findings and findings[0].name == name.partition(",")[0], [str(finding) for finding in findings]


def test_nothing_is_said_of_a_healthy_cache() -> None:
    """Also where there was no request yet."""
    assert examine(evidence_in_metrics(page_of(Asker(num_gpu=200)))["0"]) == []
    assert examine(evidence_in_metrics(page_of(rounds(Asker(num_gpu=200))))["0"]) == []


def test_what_is_on_the_page_is_read() -> None:
    """Sizes, the policy, requests and tokens are those of the cache."""
    asker = rounds(Asker(num_gpu=34, num_cpu=50))
    case = evidence_in_metrics(page_of(asker))["0"]
    assert (case.num_gpu_blocks, case.num_cpu_blocks, case.block_size, case.policy) == (34, 50, 4, "lru")
    assert (case.num_requests, case.num_tokens) == (40, 40 * 42)
    assert sum(miss.num_tokens for miss in case.misses) == sum(asker.cache.stats().missed_tokens.values())


@pytest.mark.parametrize("text", ["", "<html>", "other_metric 1\n", "a{b= 1"])
def test_what_is_no_page_is_refused(text: str) -> None:
    """With a word on what to give."""
    with pytest.raises(MetricsError, match="give"):
        evidence_in_metrics(text)
