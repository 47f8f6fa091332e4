"""A story is the same each time: in a fresh process, after others, and whatever `PYTHONHASHSEED` is."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.fault_kinds import FAULTS
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, FoundStory, as_test, run_story, shortest
from fastdeploy_cache.launch.faults.story import ACTS, Settings, from_json, to_json
from fastdeploy_cache.launch.faults.user import StoryUser
from fastdeploy_cache.launch.faults.world import StoryFinding
from tests.simulation.planted import named
from tests.simulation.planting import in_place

_SEEDS = (3, 11, 19, 40)
_DIGESTS = """
import sys
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, run_story
from fastdeploy_cache.launch.faults.drawing import new_story
for seed in map(int, sys.argv[1:]):
    outcome = run_story(new_story(seed, ALL_FAULTS))
    print(seed, outcome.num_steps, outcome.trace)
"""


def digests(hash_seed: str, seeds: tuple[int, ...]) -> list[str]:
    """Steps and digest of each story, in a process of its own."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, "-c", _DIGESTS, *map(str, seeds)]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True).stdout
    return sorted(said.splitlines())


@pytest.mark.processes
def test_a_story_is_the_same_everywhere() -> None:
    """Two processes with other seeds of hashes, one in the reverse order, and this one: the same steps, drawn alike."""
    here = []
    for seed in _SEEDS:
        outcome = run_story(new_story(seed, ALL_FAULTS))
        here.append(f"{seed} {outcome.num_steps} {outcome.trace}")
    assert sorted(here) == digests("1", _SEEDS) == digests("77", _SEEDS[::-1])


def test_a_story_leaves_nothing() -> None:
    """Engines die in the midst of copies, and neither they, nor their memory, nor their threads are left."""

    def left() -> tuple[int, int, int]:
        gc.collect()
        num_maps = Path("/proc/self/maps").read_text().count("/dev/zero")
        return (
            sum(isinstance(each, PrefixCacheManager) for each in gc.get_objects()),
            num_maps,
            threading.active_count(),
        )

    before, num_met = left(), 0
    for seed in range(500, 520):
        counts = run_story(new_story(seed, ALL_FAULTS)).counts
        assert left() == before
        num_met += counts["engine deaths"] > 0 and counts["steps: copy"] > 0
        if num_met == 2:
            return
    raise AssertionError("no engine dies in these stories, or nothing is copied")


def test_other_faults_do_not_come() -> None:
    """What is named is all that there is, also of what fails all along."""
    for seed in range(40):
        settings = new_story(seed, ("kill rank",)).settings
        assert settings.memory_error_share == settings.outside_error_share == 0.0
    assert any(new_story(seed, ("memory errors",)).settings.memory_error_share for seed in range(40))


def test_a_story_goes_through_a_file() -> None:
    """Written and read again it is the same."""
    story = new_story(7, ALL_FAULTS)
    assert from_json(to_json(story), "a file") == story


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda data: data[: len(data) // 2], "is no story, or is cut short"),
        (lambda data: data.replace(b'"version": 3', b'"version": 99'), "is a story of version 99"),
        (lambda data: data.replace(b'"seed"', b'"seeds"'), "is no story, or is cut short"),
        (lambda _: b"\xff\xfe", "is no story, or is cut short"),
    ],
)
def test_what_is_no_story_is_refused(damage: object, why: str) -> None:
    """Cut short, of another version, with other fields, no text at all: one line."""
    with pytest.raises(LaunchError, match=why):
        from_json(damage(to_json(new_story(7, ALL_FAULTS))), "a file")  # type: ignore[operator]


def test_each_act_and_fault_can_be_done() -> None:
    """What stories are drawn from is what users and the machine know."""
    cache: Any = SimpleNamespace(blocks=None)
    for settings in (Settings(), Settings(num_units=(8, 20), has_store=False)):
        engine: Any = SimpleNamespace(settings=settings, world=SimpleNamespace(host=SimpleNamespace(sleep=None)))
        assert set(ACTS) == set(StoryUser(engine, 0, cache)._acts)
    assert set(ALL_FAULTS) == set(FAULTS)


def test_a_found_story_is_made_short() -> None:
    """A planted fault in a drawn story: what is left of it still shows it, is a test of a few lines, and runs clean
    without the fault."""
    planted, seed = named("a namespace is no part of the key"), 0
    with in_place(planted):
        story = new_story(seed, ALL_FAULTS)
        (finding, *_) = run_story(story).findings
        short = shortest(story, finding.kind, most_tries=120)
        assert finding.kind in {each.kind for each in run_story(short).findings}
    assert sum(len(acts) for users in short.users for acts in users) < 30
    assert len(short.faults) <= len(story.faults)
    text = as_test(FoundStory(short, finding, 0, []))
    names: dict[str, object] = {}
    exec(text, names)
    (test,) = [value for name, value in names.items() if name.startswith("test_")]
    test()  # type: ignore[operator]
    with in_place(planted), pytest.raises(AssertionError):
        test()  # type: ignore[operator]


def test_a_finding_says_what_was_seen() -> None:
    """Its parts survive being written."""
    finding = StoryFinding("wrong bytes", "engine 0", "")
    assert msgspec.convert(msgspec.to_builtins(finding), StoryFinding) == finding
