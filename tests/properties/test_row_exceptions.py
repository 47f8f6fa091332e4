"""The same as `test_exceptions`, of a hybrid model: what a verb has half done would be read by somebody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.books.leaves.policy import EvictionPolicy, LeastRecentlyUsed
from fastdeploy_cache.callers.blocks import CallerBlocks
from fastdeploy_cache.callers.copies import BlockCopies
from fastdeploy_cache.callers.own_units import CallerUnits
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.requests.loads import MatchLoads
from fastdeploy_cache.requests.row_verbs import RowVerbs
from tests.rigs.row_caller_walk import RowCaller
from tests.rigs.row_story import RowStory
from tests.rigs.sites import OutOfMemoryError, OutsideError, Site, Tracer, methods, traced

NUM_STEPS = 160
WITH_CPU = 4  # the story with a CPU tier, from which it loads checkpoints
OF_CALLERS = 6
IN_PLACE, IN_PLACE_WITH_CPU = 5, 7  # states are copied for kernels that write in place
VERBS = (
    (PrefixCacheManager, ("match", "commit", "release", "prefetch", "reset")),
    (RowVerbs, ("allocate", "step", "snapshot")),
    (MatchLoads, ("poll",)),
    (CallerBlocks, ("allocate", "free", "pin", "unpin", "lookup")),
    (CallerUnits, ("allocate", "free", "positions")),
    (BlockCopies, ("swap_out", "swap_in")),
)


def tick() -> float:
    """A clock that stands still, so that each story is the same."""
    return 0.0


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """Follows each verb of any manager."""
    outside = methods("policy", EvictionPolicy, LeastRecentlyUsed) | methods("metric", CacheMetrics, CacheMetrics)
    follows = Tracer(outside)
    for part, verbs in VERBS:
        for verb in verbs:
            monkeypatch.setattr(part, verb, traced(follows, getattr(part, verb)))
    return follows


def play(tracer: Tracer, seed: int, armed: tuple[Site, int] | None) -> None:
    """A whole story, in which one call fails."""
    if seed == OF_CALLERS:
        play_callers(tracer, armed)
        return
    num_cpu_blocks = 40 * (seed in (WITH_CPU, IN_PLACE_WITH_CPU))
    story = RowStory(seed, tick, num_cpu_blocks, state_copy=seed in (IN_PLACE, IN_PLACE_WITH_CPU))
    tracer.begin(armed)
    try:
        for _ in range(NUM_STEPS):
            try:
                story.step()
            except OutOfMemoryError:
                story.check()
            except OutsideError as error:
                raise AssertionError(f"{error} reached the engine") from error
        assert armed is not None or not num_cpu_blocks or story.num_loaded >= 3, "hardly a checkpoint was loaded"
        assert armed is not None or seed < IN_PLACE or story.num_copied >= 3, "hardly a state was copied"
    finally:
        tracer.end()
        story.finish()


def play_callers(tracer: Tracer, armed: tuple[Site, int] | None) -> None:
    """The same of an adapter's caller, whose copies end late."""
    story = RowCaller(OF_CALLERS)
    tracer.begin(armed)
    try:
        for _ in range(NUM_STEPS * 2):
            try:
                story.step()
            except OutOfMemoryError:
                story.cache.check_invariants()
            except OutsideError as error:
                raise AssertionError(f"{error} reached the engine") from error
        assert armed is not None or min(story.num_moved["in"], story.num_moved["out"]) >= 3, "hardly anything was moved"
    finally:
        tracer.end()
        story.finish()


@pytest.mark.parametrize("seed", [1, 2, WITH_CPU, IN_PLACE, IN_PLACE_WITH_CPU, OF_CALLERS])
def test_whatever_fails_beside_a_verb_of_rows(tracer: Tracer, seed: int) -> None:
    """After each failure the story goes on: no unit or state but the right one is read, and nothing is left behind."""
    play(tracer, seed, None)
    reached, num_raised = dict(tracer.hits), 0
    for site, num_hits in sorted(reached.items()):
        for hit in sorted({1, (num_hits + 1) // 2, num_hits}):
            try:
                play(tracer, seed, (site, hit))
            except Exception as error:
                raise AssertionError(f"after {site} failed at its hit {hit} of {num_hits}: {error!r}") from error
            num_raised += tracer.has_raised
    assert {site.kind for site in reached} >= {"growth", "policy", "metric"}
    places = {site.where.rpartition("/")[2] for site in reached}
    of_callers = {"anchored_copies.py", "own_blocks.py", "own_units.py"}
    assert places >= (of_callers if seed == OF_CALLERS else {"anchors.py", "snapshots.py", "unit_pool.py"}), places
    assert seed != WITH_CPU or places >= {"images.py", "block_mover.py"}, places
    assert num_raised > 1.5 * len(reached), "the story reaches next to nothing"
