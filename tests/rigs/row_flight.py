"""Walks over a hybrid model that are recorded, and replayed."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.insight.flight.file import read_recording
from fastdeploy_cache.launch.simulator.flight_replay import FlightReplay
from fastdeploy_cache.launch.simulator.replay_outcome import ReplayOutcome
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_tasks import Held
from tests.rigs.row_story import RowStory


def replayed(cache: PrefixCacheManager, path: Path) -> ReplayOutcome:
    """What a replay of all that the cache has recorded comes to."""
    cache.insight.write_flight(path)
    return FlightReplay(read_recording(path)).run(lambda again: again.check_invariants())


def recorded_walk(seed: int, num_steps: int, path: Path, num_cpu_blocks: int) -> ReplayOutcome:
    """Steps of a `RowStory` whose copies end when they like, or fail."""
    choose, ticks = random.Random(seed), itertools.count()
    story = RowStory(seed, lambda: next(ticks) / 1000, num_cpu_blocks)
    held = Held(story.cache, (TaskKind.SWAP_IN, TaskKind.SWAP_OUT))
    for _ in range(num_steps):
        story.step()
        if choose.random() < 0.4:
            held.go(lambda _: choose.random() < 0.1)
    held.go()
    held.go()
    outcome = replayed(story.cache, path)
    story.finish()
    return outcome
