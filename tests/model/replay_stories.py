"""Runs stories of the simulation, and has the model of one block repeat what the real code did in them.

`python -m tests.model.replay_stories --stories 10000 --seed 0`. It says what the model refuses, which is a defect of
the model or of the code, and returns 1 then.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, run_story
from fastdeploy_cache.launch.faults.story import Story
from tests.model.checker import Replays
from tests.model.hooks import recording
from tests.model.traces import Place, Trace, in_words, traces_of

_BATCH, _SHOWN_STEPS, _MOST_ACTS = 100, 30, 250


@dataclass
class Repeated:
    """What repeating has come to so far."""

    num_stories: int = 0
    num_story_steps: int = 0
    num_traces: int = 0  # one for each block of each life of an engine
    num_different: int = 0  # of these
    num_steps: int = 0  # of these
    refused: list[str] = field(default_factory=list)  # or in which the story itself has found something


def repeat(stories: Iterable[Story], replays: Replays, batch: int = _BATCH) -> Iterator[Repeated]:
    """Run stories and repeat them, so many at a time; yields what has been seen up to then, after each batch."""
    so_far, known = Repeated(), set[int]()
    waiting: dict[int, dict[Trace, tuple[int, Place]]] = {}
    with recording() as recorder:
        for story in stories:
            if story.settings.has_rows:  # the model knows blocks of one row, and no checkpoint
                continue
            outcome = run_story(story)
            so_far.num_story_steps += outcome.num_steps
            so_far.num_stories += 1
            so_far.refused += [f"seed {story.seed}: {each.kind}: {each.text}" for each in outcome.findings]
            num_ranks = story.settings.tp_size
            for events in recorder.lives.values():
                for place, trace in traces_of(events, num_ranks):
                    so_far.num_traces += 1
                    if (key := hash((num_ranks, trace))) not in known:
                        known.add(key)
                        waiting.setdefault(num_ranks, {})[trace] = story.seed, place
            if so_far.num_stories % batch == 0:
                _repeat(so_far, waiting, replays)
                yield so_far
        _repeat(so_far, waiting, replays)
        yield so_far


def _repeat(so_far: Repeated, waiting: dict[int, dict[Trace, tuple[int, Place]]], replays: Replays) -> None:
    for num_ranks, traces in waiting.items():
        so_far.num_different += len(traces)
        so_far.num_steps += sum(map(len, traces))
        for trace, num_taken in replays.of(num_ranks).refused(traces).items():
            seed, (tier, block_id) = traces[trace]
            steps = in_words(trace)[max(0, num_taken - _SHOWN_STEPS) : num_taken + 1]
            so_far.refused.append(f"seed {seed}, {tier} block {block_id}, step {num_taken}: {', '.join(steps)}")
    waiting.clear()


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stories", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--most-acts", type=int, default=_MOST_ACTS, help="of each user")
    options = parser.parse_args()
    num_shown = 0
    gc.freeze()  # what is loaded stays: the look for a story's garbage need not go over it
    seeds = range(options.seed, options.seed + options.stories)
    stories = (new_story(seed, ALL_FAULTS, options.most_acts) for seed in seeds)
    with tempfile.TemporaryDirectory() as folder:
        for so_far in repeat(stories, Replays(Path(folder))):
            print(
                f"{so_far.num_stories} stories, {so_far.num_story_steps} steps: {so_far.num_traces} traces, "
                f"{so_far.num_different} different, {so_far.num_steps} steps of the model, "
                f"{len(so_far.refused)} refused",
                flush=True,
            )
            for text in so_far.refused[num_shown:]:
                print(text, flush=True)
            num_shown = len(so_far.refused)
    return 1 if so_far.refused else 0


if __name__ == "__main__":
    raise SystemExit(main())
