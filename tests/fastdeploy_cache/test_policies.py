"""Each eviction policy takes what its name says, and never worse than it promises."""

from __future__ import annotations

import gc
import random
import tracemalloc

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.errors import ConfigError, RequestError
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.policies.reuse import Reuse
from fastdeploy_cache.policies.reuse_classes import NUM_CLASSES, private_class, shared_class
from fastdeploy_cache.policies.reuse_history import NUM_AGES, Note, ReuseHistory, score_at
from tests.rigs.policy_cache import Cache


def test_lru_takes_what_was_used_longest_ago() -> None:
    """A used again after B: B goes."""
    cache = Cache("lru", 13)
    for name in "ABCA":
        cache.serve(name)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 4, "B": 0, "C": 4, "D": 4}


def test_fifo_takes_what_was_computed_longest_ago() -> None:
    """A used again after B: A goes all the same."""
    cache = Cache("fifo", 13)
    for name in "ABCA":
        cache.serve(name)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 0, "B": 4, "C": 4, "D": 4}


def test_lfu_takes_what_was_used_least_often() -> None:
    """A and B were used twice long ago, C once just now."""
    cache = Cache("lfu", 13)
    for name in "AABBC":
        cache.serve(name)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 4, "B": 4, "C": 0, "D": 4}


def test_slru_protects_what_was_used_twice_and_counts_no_further() -> None:
    """C, used once, goes before A and B; with D as the only other newcomer, A goes before B, used more often or not."""
    cache = Cache("slru", 13)
    for name in "AAABBC":
        cache.serve(name)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 4, "B": 4, "C": 0, "D": 4}
    for name in "CCDD":
        cache.serve(name)
    assert cache.cached("B") == {"B": 4} or cache.cached("A") == {"A": 0}


def test_priority_goes_before_age_until_its_time_is_over() -> None:
    """80 stays, 20 goes first, none is 35; a priority that has run out is 35 again."""
    cache = Cache("priority", 13)
    cache.serve("A", priority=80, keep_seconds=60)
    cache.serve("B")
    cache.serve("C", priority=20)
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 4, "B": 4, "C": 0, "D": 4}
    cache.serve("E")
    assert cache.cached("ABDE") == {"A": 4, "B": 0, "D": 4, "E": 4}
    cache.now = 61
    cache.serve("F")
    assert cache.cached("ADEF") == {"A": 0, "D": 4, "E": 4, "F": 4}


def test_a_pin_lasts_its_time_and_a_new_use_renews_it() -> None:
    """Pinned runs go last, but they do go when nothing else is left."""
    cache = Cache("pin", 13)
    cache.serve("A", keep_seconds=10)
    cache.now = 8
    cache.serve("A", keep_seconds=10)
    cache.serve("B")
    cache.serve("C")
    cache.now = 12
    cache.serve("D")
    assert cache.cached("ABCD") == {"A": 4, "B": 0, "C": 4, "D": 4}
    cache.now = 19
    cache.serve("E")
    assert cache.cached("ACDE") == {"A": 0, "C": 4, "D": 4, "E": 4}
    full = Cache("pin", 5)
    full.serve("A", keep_seconds=1000)
    full.serve("B", keep_seconds=1000)
    assert full.cached("AB")["B"] == 4, "a pin does not keep the engine from serving"


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_every_block_can_be_had(policy: str) -> None:
    """Whatever was cached and shared how, an allocation of the whole pool gets it, and no leaf is forgotten."""
    rng = random.Random(5)
    cache = Cache(policy, 40)
    for _ in range(300):
        cache.now += rng.random()
        cache.serve(rng.choice("ABCDEFGH"), rng.randint(1, 14), priority=rng.choice((None, 10, 90)), keep_seconds=3)
        cache.manager.check_invariants()
    request = Request(request_id="all", prompt_token_ids=range(40))
    cache.manager.match(request)
    assert len(set(cache.manager.allocate(request, 40))) == 40
    assert cache.manager.stats().gpu.num_cached == 0
    cache.manager.check_invariants()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_reset_starts_every_policy_anew(policy: str) -> None:
    """Nothing of the time before is evicted later, and eviction goes on."""
    cache = Cache(policy)
    for name in "ABCD":
        cache.serve(name)
    cache.manager.reset()
    for name in "EFGHE":
        cache.serve(name)
    assert cache.cached("A") == {"A": 0}


def test_an_unknown_policy_is_refused_with_the_list() -> None:
    """The message has all names."""
    with pytest.raises(ConfigError, match="eviction_policy is 'arc'; use one of lru, fifo, lfu, slru, priority, pin"):
        CacheConfig(num_gpu_blocks=4, transfer_client="inline", eviction_policy="arc")


@pytest.mark.parametrize(
    "hint",
    [
        {"priority": 101},
        {"priority": -1},
        {"priority": "high"},
        {"priority": True},
        {"priority": float("nan")},
        {"keep_seconds": -1.0},
        {"keep_seconds": "5"},
        {"namespace": 5},
    ],
)
def test_impossible_hints_are_refused(hint: dict[str, float]) -> None:
    """With the value seen, when the request is made: a release cannot fail."""
    with pytest.raises(RequestError, match=r"(has|of request 'r' is|priority|keep_seconds) .+; give"):
        Request(request_id="r", prompt_token_ids=[1], **hint)  # type: ignore[arg-type]


def test_hints_cannot_be_changed_or_misspelt_later() -> None:
    """Numbers are fixed when the request is made; an attribute that does not exist is an error."""
    request = Request(request_id="r", prompt_token_ids=[1], priority=5)
    for name, value in (("priority", "high"), ("keep_seconds", 3), ("sesion_ended", True)):
        with pytest.raises(AttributeError):
            setattr(request, name, value)


# -- reuse


def test_classes_are_those_of_the_docstrings() -> None:
    """Borders of each bucket; classes of different turn, pause or length differ."""
    assert [shared_class(n) for n in (0, 1, 2, 3, 4, 8, 16, 31, 32, 1000)] == [0, 0, 1, 1, 2, 3, 4, 4, 5, 5]
    turns = [private_class(turn, 0, 0) for turn in (1, 2, 3, 4, 5, 8, 9, 50)]
    assert [turns.index(c) for c in turns] == [0, 1, 2, 2, 4, 4, 6, 6]
    assert len({private_class(2, gap, 0) for gap in (0, 4_095)}) == 1
    assert len({private_class(2, gap, 0) for gap in (4_095, 4_096, 16_384, 65_536)}) == 4
    assert len({private_class(1, gap, 0) for gap in (0, 1e9)}) == 1, "a first turn had no pause"
    assert len({private_class(1, 0, n) for n in (2047, 2048, 4096, 8192)}) == 4


def _learned(reused_after: float, never: int = 0) -> ReuseHistory:
    """Blocks of one class that come back after so long, and some that never do."""
    history, now = ReuseHistory(100, 2**20, 1024), 0.0
    for i in range(2000):
        now += reused_after / 20
        history.observe(now, [([i % 20], Note(10, 1, 1, False))], 100)
        if never:
            history.observe(now, [([1000 + i], Note(20, 1, 1, False))], 100)
    return history


def test_what_comes_back_scores_above_what_does_not() -> None:
    """A class whose blocks return beats one whose blocks never do; soon beats late."""
    history = _learned(1000.0, never=1)
    assert history.table is not None
    back, gone = history.table[10], history.table[20]
    assert score_at(back, 100) > 5 * score_at(gone, 100)
    soon, late = _learned(1000.0).table, _learned(100_000.0).table
    assert soon is not None
    assert late is not None
    assert score_at(soon[10], 500) > 5 * score_at(late[10], 500)


def test_a_score_rises_as_the_return_comes_nearer_and_falls_once_it_is_overdue() -> None:
    """Blocks that always return after 1000 ticks: worth most just before, least when they did not come."""
    table = _learned(1000.0, never=1).table
    assert table is not None
    scores = [score_at(table[10], age) for age in (10, 300, 700, 5000)]
    assert scores[0] < scores[1] < scores[2] > scores[3]


def test_the_history_stays_within_its_bytes() -> None:
    """Entries are capped by configuration, however large the cache; slots are used again."""
    gc.collect()
    tracemalloc.start()
    try:
        history = ReuseHistory(10**6, 4 * 2**20, 1024)
        table_bytes, _ = tracemalloc.get_traced_memory()
        for i in range(3 * history.num_entries):
            history.observe(float(i), [([i * 2**40], Note(10, 1, 1, False))], history.num_entries // 7)
        history_bytes = tracemalloc.get_traced_memory()[0] - table_bytes
    finally:
        tracemalloc.stop()
    assert 2**20 < history_bytes < 4 * 2**20
    newest = 3 * history.num_entries - 1
    assert history.remembered(newest * 2**40) is not None
    assert history.remembered((newest - history.num_entries) * 2**40) is None


def _cyclic(policy: str) -> float:
    """A loop over more prompts than fit: LRU hits nothing."""
    cache = Cache(policy, 120)
    num_hits = 0
    for i in range(4000):
        cache.now += 1
        hits = cache.serve(chr(200 + i % 40), 4)
        num_hits += hits if i >= 2000 else 0
    return num_hits / (2000 * 4)


def test_reuse_keeps_a_part_of_a_loop_that_lru_loses_whole() -> None:
    """40 prompts of 4 blocks in 120: LRU 0 %, reuse more than a third."""
    assert _cyclic("lru") == 0
    assert _cyclic("reuse") > 0.33


def test_the_guard_falls_back_to_lru() -> None:
    """Scores that are wrong on purpose: with the guard the loss against LRU stays small, without it it is large."""

    def hit_rate(policy: str, *, guard: bool = True) -> float:
        rng, cache = random.Random(3), Cache(policy, 200)
        chosen = cache.manager._books.tree.policy.chosen
        if isinstance(chosen, Reuse):
            chosen._guard = guard
            observe = chosen.history.observe

            def lie(now: float, runs: list, num_resident: int) -> bool:
                has_learned = observe(now, runs, num_resident)
                if has_learned:  # the younger, the worse: most recently used goes first
                    chosen.history.table = [list(range(NUM_AGES + 1))] * NUM_CLASSES
                return has_learned

            chosen.history.observe = lie  # type: ignore[method-assign]
        num_hits = num_tokens = 0
        for i in range(6000):
            cache.now += 1
            num_hits += cache.serve(chr(1000 + i // 20 + int(rng.expovariate(1 / 12))), 4)
            num_tokens += 5
        return num_hits / num_tokens

    lru, guarded, bare = hit_rate("lru"), hit_rate("reuse"), hit_rate("reuse", guard=False)
    assert lru - guarded < 0.006
    assert lru - bare > 0.02


def _hit_rate_of_half_that_return(hint: str | None) -> float:
    """Of conversations of which half come back, with a hint for those that it is about."""
    rng, cache = random.Random(7), Cache("reuse", 75)
    num_hits = num_back = 0
    waiting: list[tuple[int, str]] = []
    for i in range(5000):
        cache.now += 1
        name, comes_back = chr(1000 + i), rng.random() < 0.5
        tokens = [100 * ord(name) + j for j in range(4)] + [1]
        request = Request(request_id=f"n{i}", prompt_token_ids=tokens)
        cache.manager.match(request)
        cache.manager.allocate(request, 5)
        cache.manager.commit(request, 4)
        if hint == "will_go_on":
            request.will_go_on = 0.9 if comes_back else 0.2
        elif hint == "will_go_on, wrong":
            request.will_go_on = 0.2 if comes_back else 0.9
        elif hint is not None and comes_back == (hint == "tool_call_pending"):
            setattr(request, hint, True)
        cache.manager.release(request)
        if comes_back:
            waiting.append((i + 30, name))
        while waiting and waiting[0][0] <= i:
            num_back += 1
            num_hits += cache.serve(waiting.pop(0)[1], 4) > 0
    return num_hits / num_back


@pytest.fixture(scope="module")
def untold() -> float:
    """The hit rate where nobody says who comes back."""
    return _hit_rate_of_half_that_return(None)


@pytest.mark.parametrize("hint", ["session_ended", "tool_call_pending", "will_go_on", "will_go_on, wrong"])
def test_hints_help(untold: float, hint: str) -> None:
    """Half of the conversations return. Told which, reuse hits more than when it has to guess; also where the contrary
    is said of all of them, since what comes of a hint is learned."""
    assert _hit_rate_of_half_that_return(hint) > untold + 0.1


@pytest.mark.parametrize("recompute", [False, True])
def test_the_guard_does_not_count_what_no_cache_could_hit(recompute: bool) -> None:
    """Whole prompts again and again in a pool that holds them all: nothing is lost, so reuse keeps the say."""
    config = CacheConfig(
        block_size=16,
        num_gpu_blocks=640,
        transfer_client="inline",
        eviction_policy="reuse",
        recompute_last_token=recompute,
    )
    manager = PrefixCacheManager(config)
    for i in range(1200):
        request = Request(request_id=str(i), prompt_token_ids=[i % 100 * 64 + j for j in range(64)])
        match = manager.match(request).wait(1.0)
        manager.allocate(request, 4 - len(match.block_ids))
        manager.commit(request, 64)
        manager.release(request)
    chosen = manager._books.tree.policy.chosen
    assert isinstance(chosen, Reuse)
    assert manager.stats().gpu.num_evicted == 0
    assert chosen._regret == 0
    assert not chosen._by_lru()


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
@pytest.mark.parametrize("by_lru", [False, True])
def test_no_policy_keeps_evicted_runs_alive(policy: str, by_lru: bool) -> None:
    """Long churn with hints that last a day: the runs that are alive are about those that are cached."""
    cache = Cache(policy, 64)
    if policy == "reuse":
        cache.manager._books.tree.policy.chosen._by_lru = lambda: by_lru  # type: ignore[attr-defined]
        if not by_lru:
            cache.manager._books.tree.policy.chosen.history._rebuild(0.0)  # type: ignore[attr-defined]
    gc.collect()
    before = sum(isinstance(each, Run) for each in gc.get_objects())
    for i in range(2000):
        cache.serve(chr(1000 + i), 6, keep_seconds=86400.0, priority=50)
    gc.collect()
    alive = sum(isinstance(each, Run) for each in gc.get_objects()) - before
    assert alive < 250


def test_a_shorter_time_counts_from_its_last_use() -> None:
    """A run kept for 100 s and then for 5 s is ranked anew after 5."""
    cache = Cache("priority", 9)
    cache.serve("A", priority=90, keep_seconds=100)
    cache.serve("A", priority=90, keep_seconds=5)
    cache.serve("B")
    cache.now = 50
    cache.serve("C", 2)
    assert cache.cached("AB") == {"A": 2, "B": 4}


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_a_request_that_was_never_admitted_is_no_use(policy: str) -> None:
    """Nor does one that comes back from preemption count twice."""
    cache = Cache(policy)
    cache.serve("A")
    (run,) = cache.manager._books.tree.runs()
    before = (run.num_uses, run.notes.turn, run.last_used)
    cache.cached("AAA")
    assert (run.num_uses, run.notes.turn, run.last_used) == before
    request = Request(request_id="twice", prompt_token_ids=[100 * ord("A") + i for i in range(4)] + [1])
    for _ in range(3):
        cache.manager.match(request)
        cache.manager.allocate(request, 1)
        cache.manager.release(request)
    assert run.num_uses <= before[0] + 1
    assert run.notes.turn <= before[1] + 1
