"""The doctor names what was planted in a sick set-up, with its evidence, and says nothing of a healthy one."""

from __future__ import annotations

import dataclasses

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.insight.doctor.doctor import examine
from fastdeploy_cache.insight.doctor.evidence import evidence_of
from fastdeploy_cache.insight.doctor.process_troubles import ProcessTrouble
from fastdeploy_cache.requests.explanation import Miss
from fastdeploy_cache.transfer_manager.client import ProcessHealth
from tests.rigs.asker import Asker
from tests.rigs.sick_caches import NUM_PROMPTS, SICK, prompt, rounds
from tests.rigs.sick_stores import SICK_STORES, StoreAsker
from tests.rigs.storage_rig import A, Rig, stored


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
    assert findings and findings[0].name == name.partition(",")[0], [str(finding) for finding in findings]
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


@pytest.mark.parametrize("name", SICK_STORES)
def test_a_store_that_is_used_badly_is_no_small_cpu_tier(name: str) -> None:
    """One finding names the setting or the call that mends it, and promises nothing of what the store may not have."""
    finding_name, make, words = SICK_STORES[name]
    (finding,) = make().cache.examine()
    assert finding.name == finding_name and words in finding.advice and finding.share is None, str(finding)


def test_nothing_is_said_of_a_store_that_is_used_well() -> None:
    """Prompts come from it; also new ones, of which it has nothing, and one that was given other weights once."""
    used = StoreAsker().rounds()
    assert used.cache.stats().storage.num_fetched_blocks > 100  # type: ignore[union-attr]
    assert names(used) == []
    new = StoreAsker()
    new.store.counts = {"num_other_weights": 1}
    for number in range(60):
        new.serve_one(prompt(number))
    assert names(new) == []


def test_a_store_that_fails_again_and_again_is_named() -> None:
    """Reads that time out open its breaker; a probe that succeeds closes it, and nothing is wrong any more."""
    rig = Rig(stored(A))
    assert rig.model.cache.examine() == []
    for _ in range(3):
        rig.prefetch(A)
        rig.store.land("timed out")
    assert [finding.name for finding in rig.model.cache.examine()] == ["breaker_open"]
    tier = rig.model.cache.storage._tier
    assert tier is not None
    tier.link.reading._probe_at = 0.0  # its pause is over
    rig.prefetch(A)
    rig.land_all()
    assert rig.model.cache.examine() == []
    rig.finish()


def test_a_store_whose_disk_is_full_is_named() -> None:
    """What it says of itself with each task counts, until it says otherwise."""
    rig = Rig()
    for num_full_disks, found in ((0, []), (1, ["disk_full"]), (0, [])):
        rig.store.counts = {"num_full_disks": num_full_disks}
        live = rig.match([*A, num_full_disks])
        rig.model.release(live)
        rig.prefetch([900 + i for i in range(41)])
        rig.land_all()
        assert [finding.name for finding in rig.model.cache.examine()] == found
    rig.finish()


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


def test_what_new_weights_made_worthless_is_no_fault() -> None:
    """What was computed with others is missed after every change of weights, with a store (which goes by their name)
    and without; the explanation says so, and the doctor advises nothing. `SICK` has resets without a reason."""
    asker = Asker(num_gpu=100)
    asker.client.auto = True
    for _ in range(30):
        asker.serve(prompt(0))
        asker.cache.life.update_weights()
    (miss, *_) = next(iter(asker.cache.explain_last(1))).misses
    assert miss.cause is Cause.RESET and "the weights had changed" in str(miss) and names(asker) == []
    asker.cache._books.follow_weights("a")
    asker.serve(prompt(0))
    asker.cache._books.follow_weights("b")
    asker.serve(prompt(0))
    assert "the weights had changed" in str(next(iter(asker.cache.explain_last(1))).misses[0])


def test_several_ranks_are_spoken_of_as_several() -> None:
    """One is down, and two or more are; likewise of those that are off, and of processes of storage."""
    case = evidence_of(Asker().config, Asker().cache.stats(), [], Asker().cache._books)
    for state, kind, one, more in (
        (ProcessHealth.STARTING, "transfer", "Rank 0 is down", "Ranks 0, 1 and 2 are down"),
        (ProcessHealth.OFF, "transfer", "Rank 0 has died too often", "Ranks 0, 1 and 2 have died too often"),
        (ProcessHealth.STARTING, "storage", "Rank 0 has no storage process", "Ranks 0, 1 and 2 have no storage proc"),
    ):
        for num_ranks, words in ((1, one), (3, more)):
            troubles = [ProcessTrouble(kind, rank, state) for rank in range(num_ranks)]
            (finding,) = examine(dataclasses.replace(case, troubles=troubles))
            assert finding.evidence.startswith(words)
