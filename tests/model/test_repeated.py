"""The model of one block repeats what the real code does in stories of the simulation, and refuses what is wrong."""

from __future__ import annotations

import itertools
import random
import shutil
from pathlib import Path

import pytest

from fastdeploy_cache.books.block_pool import FREE, REQUEST, RUN, TASK
from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.search import ALL_FAULTS, run_story
from tests.model.checker import Replays
from tests.model.hooks import recording
from tests.model.replay_stories import repeat
from tests.model.traces import code, traces_of
from tests.rigs.kept_stories import kept_stories

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(not (shutil.which("spin") and shutil.which("gcc")), reason="needs spin and gcc"),
    pytest.mark.timeout(600),
]
ONCE_REFUSED = kept_stories(Path(__file__).with_name("once_refused.jsonl"))  # whose real steps were refused
STORED = (code("TAKE", REQUEST), code("HANDED", REQUEST, RUN), code("PUT_READ", 0, 0), code("ADDED", 0))
WHOLE = (code("SENT_TO", 0, 0), code("BEGUN", 0, 0), code("FINISHED", 0, 0), code("HEARD_OK", 0, 0), code("ENDED", 0))
LOADED = (code("TAKE", TASK), code("PUT_WRITE", 0, 0), code("ADDED", 0))


@pytest.fixture(scope="module")
def replays(tmp_path_factory: pytest.TempPathFactory) -> Replays:
    return Replays(tmp_path_factory.mktemp("model"))


def test_stories_are_repeated(replays: Replays) -> None:
    """Whatever faults come: each step that the real code takes is one that the model allows, from seeds that are drawn
    and from those that were refused once."""
    drawn = random.SystemRandom().randrange(10**9)
    new = (new_story(seed, ALL_FAULTS) for seed in range(drawn, drawn + 100))
    for seen in repeat(itertools.chain((kept.story() for kept in ONCE_REFUSED), new), replays, 1):
        assert not seen.refused, (drawn, seen.refused)
        if seen.num_stories >= 14 and seen.num_steps > 50_000:
            return
    raise AssertionError(f"100 stories from {drawn} on have too few steps")


@pytest.mark.parametrize(
    ("trace", "refused_at"),
    [
        ((*STORED, *WHOLE, code("FREED", RUN)), None),
        ((*STORED, code("FREED", RUN)), 4),
        ((*LOADED, *WHOLE, code("HANDED", TASK, RUN)), None),
        ((*LOADED, code("HANDED", TASK, RUN)), 3),
        ((*LOADED, code("FORGOT"), *WHOLE, code("HANDED", TASK, RUN)), 9),
        ((*LOADED, *WHOLE[:2], code("FREED", TASK)), 5),
        ((*LOADED, *WHOLE[:2], code("DIED", 0, 0), code("UNREACHED", 0, 0)), 6),
        ((code("TAKE", REQUEST), code("TAKE", REQUEST)), 1),
    ],
    ids=["copy", "evicted while read", "load", "landed early", "landed late", "freed early", "not reaped", "twice"],
)
def test_a_wrong_step_is_refused(replays: Replays, trace: tuple[int, ...], refused_at: int | None) -> None:
    """It is said which one; what is right is taken."""
    assert replays.of(1).refused([trace]) == ({} if refused_at is None else {trace: refused_at})


def test_a_rank_that_has_not_answered_is_missed(replays: Replays) -> None:
    """Of two ranks both have to be heard before a task ends, and its block is somebody's."""
    begun = (*LOADED, code("SENT_TO", 0, 0), code("SENT_TO", 0, 1))
    done = [(code("BEGUN", 0, rank), code("FINISHED", 0, rank), code("HEARD_OK", 0, rank)) for rank in range(2)]
    rest = (code("ENDED", 0), code("HANDED", TASK, RUN))
    whole, half = (*begun, *done[1], *done[0], *rest), (*begun, *done[0], *rest)
    assert replays.of(2).refused([whole, half]) == {half: len(half) - 2}


def test_blocks_are_followed_through_a_story() -> None:
    """A trace begins with a block that is free, names each later step, and is the same however often it is told."""
    story = new_story(3, ALL_FAULTS)
    told = []
    for _ in range(2):
        with recording() as recorder:
            run_story(story)
            told.append([list(traces_of(events, story.settings.tp_size)) for events in recorder.lives.values()])
    assert told[0] == told[1] and sum(map(len, told[0])) > 20
    first = {trace[0] for life in told[0] for _, trace in life}
    assert first <= {code("TAKE", owner) for owner in (REQUEST, TASK)} and FREE == 0
