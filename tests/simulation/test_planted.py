"""The machine that looks for faults is seen to find: each fault that is planted into the product shows.

The search begins where the fault was found before (`found.json`); a change of the product may move it to another story
near by. The whole search, from the first story on, runs in `.ci/night`.
"""

from __future__ import annotations

import functools
import inspect
import os

import pytest

from fastdeploy_cache.books import arrivals
from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, run_story
from tests.simulation import planted as rig
from tests.simulation import planting
from tests.simulation.find_planted import MOST_STEPS, find, known

_NEAR_STEPS = int(os.environ.get("FASTDEPLOY_CACHE_PLANTED_STEPS", "200000"))


@functools.cache  # most are found in the same few stories
def is_clean(seed: int) -> bool:
    """Whether nothing is found in a story without a planted fault."""
    return not run_story(new_story(seed, ALL_FAULTS)).findings


def test_there_are_thirty() -> None:
    """As many were found, each within the steps that it may take, and no fault is in the table that is not planted."""
    table = known()
    assert set(table) == {each.name for each in rig.ALL}
    assert len(table) >= 30
    assert all(found["num_steps"] <= MOST_STEPS for found in table.values())


@pytest.mark.parametrize("name", [each.name for each in rig.ALL])
def test_it_is_found(name: str) -> None:
    """By its name, in a story that is clean without it."""
    found = find(rig.named(name), known()[name]["seed"], _NEAR_STEPS)
    assert found is not None, "not found where it was; run `python -m tests.simulation.find_planted` and look"
    assert is_clean(found["seed"]), "the story shows something without the fault"


def test_planting_leaves_nothing() -> None:
    """The product is as it was afterwards, and words that are not there cannot be planted."""
    before = arrivals.land.__code__
    with planting.in_place(rig.named("a prefetch lands behind a hole")):
        pass
    assert arrivals.land.__code__ is before
    assert "if num_found < first" in inspect.getsource(arrivals.insert_copies)
    wrong = planting.Planted("x", (planting.Rewrite("books.arrivals", "land", "no such words", ""),))
    with pytest.raises(AssertionError, match="has 'no such words' 0 times"), planting.in_place(wrong):
        pass
