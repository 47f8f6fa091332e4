"""A promise that is broken is seen by the order of things, also where no byte is wrong yet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, run_story
from tests.model.checker import Replays
from tests.model.replay_stories import repeat
from tests.simulation import planted, planting
from tests.simulation.order_oracles import watching_order

FAILING_COPIES, LATE = ("failing copies",), ("late messages",)
# the story in which each planted fault was seen, the faults that it had, and what was said of it
SEEN = {
    "a receive joins without the owner's last word": (
        2,
        ALL_FAULTS,
        "a receive ends well without its owner's last word",
    ),
    "a copy down lands where it does not fit": (60, FAILING_COPIES, "a copy is not where its task has put it"),
    "an owner confirms what it does not hold any more": (10, LATE, "an owner confirms what it does not hold"),
}
_MOST_STORIES = 20
REAPED_LATE = "ids go home before the rank is reaped"


def test_order_holds_in_stories() -> None:
    """The product as it is: hand-overs that are received, copies that land."""
    with watching_order() as oracles:
        stories = [new_story(2, ALL_FAULTS), new_story(7, FAILING_COPIES), new_story(2, LATE)]
        outcomes = [run_story(story) for story in stories]
    assert not oracles.broken and sum(outcome.counts["received"] for outcome in outcomes) > 0


@pytest.mark.parametrize("name", SEEN)
def test_a_planted_fault_is_seen(name: str) -> None:
    """In a story in which every byte is right: the one that is known, or another one near by."""
    first, faults, words = SEEN[name]
    with planting.in_place(planted.named(name)), watching_order() as oracles:
        for seed in range(first, first + _MOST_STORIES):
            outcome = run_story(new_story(seed, faults))
            if oracles.broken or outcome.findings:
                break
    assert set(oracles.broken) == {words} and not outcome.findings


@pytest.mark.processes
@pytest.mark.timeout(300)
@pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc")
def test_ids_that_go_home_early_are_refused_by_the_model(tmp_path: Path) -> None:
    """A rank is answered for before it has been reaped: the model of one block knows no such step."""
    with planting.in_place(planted.named(REAPED_LATE)):
        *_, seen = repeat([new_story(0, ("endless copies",))], Replays(tmp_path))
    assert seen.refused and all("UNREACHED" in text for text in seen.refused)


def test_each_fault_of_this_kind_is_tried() -> None:
    """None is listed that no test plants."""
    assert {fault.name for fault in planted.BY_ORDER} == {*SEEN, REAPED_LATE}
