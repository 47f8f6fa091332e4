"""The doctor names what was planted in a sick set-up, with its evidence, and says nothing of a healthy one."""

from __future__ import annotations

import dataclasses

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.causes import Cause
from fastdeploy_cache.explanation import Miss
from fastdeploy_cache.insight.doctor import examine
from fastdeploy_cache.insight.evidence import evidence_of
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.stats import StorageTierStats
from tests.rigs.asker import Asker
from tests.rigs.sick_caches import NUM_PROMPTS, SICK, prompt, rounds


def names(asker: Asker) -> list[str]:
    findings = asker.cache.examine()
    assert all(str(finding).startswith(finding.name) for finding in findings)
    return [finding.name for finding in findings]


@pytest.mark.parametrize("name", SICK)
def test_the_planted_cause_comes_first(name: str) -> None:
    """With words that name what was seen and what to change; and nothing else costs as much."""
    make, words = SICK[name]
    asker = make()
    findings = asker.cache.examine()
    assert findings and findings[0].name == name, [str(finding) for finding in findings]
    assert words in str(findings[0])


@pytest.mark.parametrize("num_cpu", [0, 200])
def test_nothing_is_said_of_a_healthy_cache(num_cpu: int) -> None:
    """All prompts fit, and come again; also of one that has served nothing, and of a few first prompts."""
    assert names(Asker(num_gpu=200, num_cpu=num_cpu)) == []
    assert names(rounds(Asker(num_gpu=200, num_cpu=num_cpu))) == []
    few = Asker(num_gpu=200, num_cpu=num_cpu)
    few.serve(prompt(0))
    assert names(few) == []


def test_new_prompts_are_no_fault() -> None:
    """Whatever is asked for the first time is new, and no setting changes that."""
    asker = Asker(num_gpu=2000)
    for number in range(60):
        asker.serve(prompt(number))
    assert names(asker) == []


@pytest.mark.parametrize(
    ("change", "name"),
    [({"num_full_disks": 1}, "disk_full"), ({"reading": BreakerState.OPEN}, "breaker_open")],
)
def test_a_store_in_trouble_is_named(change: dict[str, object], name: str) -> None:
    """By its present state, without any request."""
    asker = Asker(num_gpu=100)
    healthy = StorageTierStats(
        is_available=True,
        reading=BreakerState.CLOSED,
        writing=BreakerState.CLOSED,
        **{field.name: 0 for field in dataclasses.fields(StorageTierStats)[3:]},
    )
    stats, books = asker.cache.stats(), asker.cache._books
    healthy_stats = dataclasses.replace(stats, storage=healthy)
    sick_stats = dataclasses.replace(stats, storage=dataclasses.replace(healthy, **change))  # type: ignore[arg-type]
    found = [examine(evidence_of(asker.config, each, [], books)) for each in (healthy_stats, sick_stats)]
    assert found[0] == [] and [finding.name for finding in found[1]] == [name]


def test_requests_that_others_matched_are_examined_likewise() -> None:
    """Those of an engine that keeps its own GPU cache."""
    asker = rounds(Asker(num_gpu=34))
    for number in range(30):
        asker.cache.blocks.count_request(
            Request(request_id=f"other {number}", prompt_token_ids=prompt(number % NUM_PROMPTS)), (0, 0, 0)
        )
    assert names(asker)[0] == "gpu_short"


def test_a_small_cpu_tier_is_told_to_grow() -> None:
    """Where it is smaller than the GPU pool, copying earlier is no advice."""
    case = evidence_of(Asker(num_gpu=64, num_cpu=16).config, Asker().cache.stats(), [], Asker().cache._books)
    miss = Miss(cause=Cause.EVICTED, num_tokens=50, tier="gpu")
    for num_cpu_blocks, words in ((16, "num_cpu_blocks, which is 16 now"), (640, "cpu_write_high_water")):
        sick = dataclasses.replace(
            case, num_requests=30, num_tokens=100, misses=[miss], num_gpu_blocks=64, num_cpu_blocks=num_cpu_blocks
        )
        (finding,) = examine(sick)
        assert finding.name == "evicted_before_copied" and words in finding.advice
