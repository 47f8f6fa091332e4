"""Stories that nobody has seen before, with all oracles: nothing is found in today's code."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.launch.faults.search import Search, as_test, run_story, search
from fastdeploy_cache.launch.faults.stage import Watch
from tests.rigs.fault_watches import mirrored
from tests.rigs.kept_stories import KeptStory, kept_stories

_NUM_STEPS = int(os.environ.get("FASTDEPLOY_CACHE_FAULT_STEPS", "100000"))
_MOST_SEED = 2**40


_ONCE_FOUND = kept_stories(Path(__file__).with_name("once_found.jsonl"))


def seen(first_seed: int, num_steps: int, watches: tuple[Callable[[PrefixCacheManager], Watch], ...]) -> Search:
    """A search up to so many steps, or to the first finding."""
    for so_far in search(first_seed=first_seed, watches=watches):
        if so_far.num_steps >= num_steps or so_far.found:
            return so_far
    raise AssertionError("a search never ends by itself")


def test_new_stories() -> None:
    """From a seed that is drawn: each run looks where none has looked before. A finding is printed as a story."""
    seed = int.from_bytes(os.urandom(5), "little") % _MOST_SEED
    so_far = seen(seed, _NUM_STEPS, (mirrored,))
    for found in so_far.found:
        raise AssertionError(f"{found.finding.kind}: {found.finding.text}\n{found.finding.trace}\n{as_test(found)}")
    assert so_far.counts["blocks compared"] > so_far.num_steps / 1000, "steps that are empty show nothing"
    assert so_far.counts["checks"] >= so_far.num_stories


@pytest.mark.parametrize("kept", _ONCE_FOUND, ids=[str(kept.seed) for kept in _ONCE_FOUND])
def test_what_was_found_stays_away(kept: KeptStory) -> None:
    """The stories in which a search has found something."""
    assert not run_story(kept.story(), (mirrored,)).findings
