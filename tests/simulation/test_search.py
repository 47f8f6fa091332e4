"""Stories that nobody has seen before, with all oracles: nothing is found in today's code."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fastdeploy_cache.launch.faults.search import Search, as_test, run_story, search
from tests.rigs.fault_watches import mirrored
from tests.rigs.kept_stories import KeptStory, kept_stories

_NUM_STEPS = int(os.environ.get("FASTDEPLOY_CACHE_FAULT_STEPS", "100000"))
_MOST_SEED = 2**40


_ONCE_FOUND = kept_stories(Path(__file__).with_name("once_found.jsonl"))


def nothing_found(num_steps: int, *, has_agents: bool = False) -> Search:
    """A search from a seed that is drawn, so that each run looks where none has looked. It goes on for so many steps,
    and until a block was compared for each thousand of them. A finding is printed as a story."""
    seed = int.from_bytes(os.urandom(5), "little") % _MOST_SEED
    for so_far in search(first_seed=seed, watches=(mirrored,), has_agents=has_agents):
        for found in so_far.found:
            what = f"{found.finding.kind}: {found.finding.text}\n{found.finding.trace}"
            raise AssertionError(f"{what}\n{as_test(found)}")
        is_much = so_far.num_steps >= num_steps and so_far.counts["blocks compared"] > num_steps / 1000
        if is_much and (so_far.counts["lent"] or not has_agents):  # steps that are empty show nothing
            return so_far
    raise AssertionError("a search never ends by itself")


def test_new_stories() -> None:
    """Whatever users, ranks and faults do."""
    so_far = nothing_found(_NUM_STEPS)
    assert so_far.counts["checks"] >= so_far.num_stories


def test_agents_and_loans() -> None:
    """The same where agents give hints between all acts, and engines lend what they have: until one has."""
    so_far = nothing_found(_NUM_STEPS // 2, has_agents=True)
    for hint in ("retain", "supersede", "demote", "prefetch hint", "release_session"):
        assert so_far.counts[f"hint: {hint}"] > 0, hint


@pytest.mark.parametrize("kept", _ONCE_FOUND, ids=[str(kept.seed) for kept in _ONCE_FOUND])
def test_what_was_found_stays_away(kept: KeptStory) -> None:
    """The stories in which a search has found something."""
    assert not run_story(kept.story(), (mirrored,)).findings
