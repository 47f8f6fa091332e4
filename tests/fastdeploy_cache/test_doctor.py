"""The doctor names what was planted in a sick set-up, with its evidence, and says nothing of a healthy one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.insight.doctor import examine
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.stats import StorageTierStats
from tests.rigs.asker import Asker

NUM_PROMPTS, NUM_ROUNDS = 8, 5


def prompt(number: int, num_tokens: int = 42) -> list[int]:
    return [1000 * (number + 1) + i for i in range(num_tokens)]


def rounds(asker: Asker, num_tokens: int = 42, num_prompts: int = NUM_PROMPTS) -> Asker:
    """A few prompts, in turn, again and again."""
    for number in list(range(num_prompts)) * NUM_ROUNDS:
        asker.serve(prompt(number, num_tokens))
    return asker


def names(asker: Asker) -> list[str]:
    findings = asker.cache.examine()
    assert all(str(finding).startswith(finding.name) for finding in findings)
    return [finding.name for finding in findings]


def copied_down(**config: object) -> Asker:
    """A GPU tier that holds three prompts, and a CPU tier that holds all."""
    return Asker(num_gpu=34, num_cpu=200, cpu_write_policy="write_through", **config)


def never_waits() -> Asker:
    """Each request allocates while its load is on its way."""
    asker = rounds(copied_down())
    for number in list(range(NUM_PROMPTS)) * NUM_ROUNDS:
        request, match = asker.match(prompt(number))
        asker.admit(request, match)
        asker.cache.commit(request, request.num_tokens)
        asker.cache.release(request)
        asker.client.land_all()
    return asker


def slow_tier() -> Asker:
    asker = copied_down(load_policy="auto", prefill_tokens_per_second=1e12)
    asker.cache._movement.speeds._block_bytes = 1
    asker.cache._movement.speeds.cpu.note(1.0, 1.0)
    return rounds(asker)


def rank_down() -> Asker:
    asker = rounds(copied_down())
    asker.client.up = False
    return asker


def a_namespace_for_each() -> Asker:
    asker = Asker(num_gpu=400)
    for number in range(40):
        asker.serve(prompt(0), namespace=f"request {number}")
    return asker


def a_time_in_front() -> Asker:
    asker = Asker(num_gpu=900)
    for number in range(40):
        asker.serve([7000 + number, *prompt(0)])
    return asker


def other_images() -> Asker:
    asker = Asker(num_gpu=400)
    for number in range(30):
        asker.serve(prompt(0), images=[(0, 40, f"upload {number}".encode())])
    return asker


def resets() -> Asker:
    asker = Asker(num_gpu=100)
    for _ in range(30):
        asker.serve(prompt(0))
        asker.cache.reset()
    return asker


def short_tier() -> Asker:
    return rounds(Asker(num_gpu=34, num_cpu=50, cpu_write_policy="write_through"))


SICK: dict[str, tuple[Callable[[], Asker], str]] = {
    "cpu_tier_short": (
        lambda: rounds(Asker(num_gpu=34, num_cpu=50, cpu_write_policy="write_through")),
        "num_cpu_blocks",
    ),
    "gpu_short": (lambda: rounds(Asker(num_gpu=34)), "CPU tier"),
    "tier_slow": (slow_tier, "computing"),
    "loads_late": (never_waits, "match.wait"),
    "rank_down": (rank_down, "Rank 0"),
    "namespace_for_each": (a_namespace_for_each, "namespace"),
    "first_blocks_differ": (a_time_in_front, "second block"),
    "blocks_too_large": (lambda: rounds(Asker(num_gpu=100, size=32), 60), "block_size"),
    "other_images": (other_images, "image"),
    "setting_forbids": (lambda: rounds(copied_down(load_policy="never")), "load_policy is 'never'"),
    "resets": (resets, "weights"),
}


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
    assert examine(asker.config, healthy_stats, [], books) == []
    assert [finding.name for finding in examine(asker.config, sick_stats, [], books)] == [name]


def test_requests_that_others_matched_are_examined_likewise() -> None:
    """Those of an engine that keeps its own GPU cache."""
    asker = rounds(Asker(num_gpu=34))
    for number in range(30):
        asker.cache.blocks.count_request(
            Request(request_id=f"other {number}", prompt_token_ids=prompt(number % NUM_PROMPTS)), (0, 0, 0)
        )
    assert names(asker)[0] == "gpu_short"
