"""Calls of a verb that can really fail, made to fail, one by one: the books add up and the verb has left no trace.

What can fail is read off the source: lines that ask for memory in proportion to blocks, lines that log, and the methods
of the protocols by which the manager calls what is outside. One that somebody adds is tried as soon as a story reaches
it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator

import pytest

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.books.leaves.policy import EvictionPolicy, LeastRecentlyUsed
from fastdeploy_cache.callers.blocks import CallerBlocks
from fastdeploy_cache.callers.copies import BlockCopies
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.policies.eviction import Priority
from fastdeploy_cache.policies.reuse import Reuse
from fastdeploy_cache.ranks import RankAccess
from fastdeploy_cache.requests.loads import MatchLoads
from fastdeploy_cache.storage.access import StorageAccess
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.storage.client import StorageClient
from tests.rigs.caller_walk import STEPS, new_caller, take_step
from tests.rigs.simulated_client import SimulatedClient
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.sites import OutOfMemoryError, OutsideError, Site, Tracer, methods, traced
from tests.rigs.storage_walk import Walk

OPERATIONS = (
    "prefetch", "match", "match", "serve", "serve", "rush", "rush", "finish", "finish", "land", "land", "land", "store",
    "store", "fail", "store_fails", "reset", "kv_lost", "write_now", "flush", "look", "end",
)  # fmt: skip
NUM_STEPS = 160
VERBS = (
    (PrefixCacheManager, ("match", "allocate", "commit", "release", "prefetch", "end_prefetch", "write_to_storage",
                          "reset")),
    (RankAccess, ("kv_lost",)),
    (StorageAccess, ("flush",)),
    (CallerBlocks, ("allocate", "free", "evict_runs", "insert", "pin", "unpin", "lookup")),
    (BlockCopies, ("load", "end_load", "swap_out", "swap_in")),
    (MatchLoads, ("poll", "wait")),
)  # fmt: skip
PASSED_ON = {"kv_lost", "flush"}  # what reaches their callers may come from the client: they ask exactly that
CALLERS = ("a caller", "another caller")  # each the seed of a story
SETTINGS = {
    "ahead of eviction": (7, "write_back", "write_through", "reuse"),
    "at once": (12, "write_through", "write_back", "priority"),
    "tiny tier": (3, "write_back", "write_through", "lru"),
}


def tick() -> float:
    """A clock that can fail; it stands still, so that each story is the same."""
    return 0.0


@pytest.fixture
def tracer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracer]:
    """Follows each verb of any manager, each look at a match, and each answer of ranks and storage."""
    outside = methods("client", TransferClient, SimulatedClient) | methods("client", StorageClient, SimulatedStorage)
    outside |= methods("policy", EvictionPolicy, Reuse, Priority, LeastRecentlyUsed)
    outside |= methods("metric", CacheMetrics, CacheMetrics)
    outside[tick.__code__] = Site("clock", "clock", "tick")
    follows = Tracer(outside)
    for part, verbs in VERBS:
        for verb in verbs:
            monkeypatch.setattr(part, verb, traced(follows, getattr(part, verb)))
    for answers in (SimulatedClient, SimulatedStorage):
        monkeypatch.setattr(answers, "_answer", traced(follows, answers._answer))
    root = logging.getLogger("fastdeploy_cache")
    root.addHandler(follows)
    root.setLevel(logging.DEBUG)
    root.propagate = False
    yield follows
    root.propagate = True
    root.removeHandler(follows)
    root.setLevel(logging.NOTSET)


class OfRequests:
    """Requests over three tiers."""

    def __init__(self, setting: str) -> None:
        num_cpu, write_policy, storage_policy, policy = SETTINGS[setting]
        self._choose = random.Random(setting)
        self._walk = Walk(num_cpu, write_policy, storage_policy, "wait_complete", policy=policy, clock=tick)
        self.model = self._walk.model

    def step(self) -> str:
        """The name of what it does; it may raise on the way."""
        self.doing = self._choose.choice(OPERATIONS)
        self._walk.step(self.doing, self._choose.randrange(60))
        return self.doing

    def finish(self) -> None:
        self._walk.finish()


class OfCallers:
    """An adapter's caller, among requests."""

    def __init__(self, setting: str) -> None:
        self._caller = new_caller(len(setting), clock=tick)
        self._steps = {name: weight for name, weight in STEPS.items() if name not in {"change_life", "down"}}
        self.model = self._caller.model

    def step(self) -> str:
        """See `OfRequests`."""
        self.doing = self._caller.choose.choices(list(self._steps), list(self._steps.values()))[0]
        take_step(self._caller, self.doing)
        return self.doing

    def finish(self) -> None:
        self._caller.finish()
        self.model.finish()


def play(tracer: Tracer, setting: str, armed: tuple[Site, int] | None) -> tuple[Exception, str] | None:
    """A whole story, the same each time, in which one call fails; what reached the engine, and during what."""
    story = OfRequests(setting) if setting in SETTINGS else OfCallers(setting)
    story.model.steps_may_fail = armed is not None
    tracer.begin(armed)
    surfaced = None
    for _ in range(NUM_STEPS):
        try:
            story.step()
        except (OutOfMemoryError, OutsideError) as error:
            surfaced = error, story.doing
            story.model.allow_all_computed()
            story.model.check()
    tracer.end()
    story.finish()
    return surfaced


@pytest.mark.parametrize("setting", [*SETTINGS, *CALLERS])
def test_whatever_fails_beside_a_verb(tracer: Tracer, setting: str) -> None:
    """After each failure the same story goes on: no wrong byte, nothing left behind, and what was refused works later.

    What fails outside (client, policy, clock, metric, log, callback) does not reach the engine at all.
    """
    play(tracer, setting, None)
    reached = dict(tracer.hits)
    num_raised = 0
    for site, num_hits in sorted(reached.items()):
        for hit in sorted({1, (num_hits + 1) // 2, num_hits}):
            try:
                surfaced = play(tracer, setting, (site, hit))
            except Exception as error:
                raise AssertionError(f"after {site} failed at its hit {hit} of {num_hits}: {error!r}") from error
            # measured speeds decide some steps of a story: a late hit may not come again, the first one does
            assert tracer.has_raised or hit > 1, f"{site} was not reached again"
            num_raised += tracer.has_raised
            if surfaced is not None and site.kind != "growth":
                assert site.kind == "client" and surfaced[1] in PASSED_ON, f"{site} failed, and {surfaced} surfaced"
    assert {site.kind for site in reached} >= {"growth", "client", "policy", "metric"}
    assert len(reached) > 15 and num_raised > 1.5 * len(reached), "the story reaches next to nothing"
