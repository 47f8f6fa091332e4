"""Units that a match of a hybrid model copies for its request: states for kernels that write in place, and windows."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import Match, PrefixCacheManager, Request
from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.float64_engine import Float64Engine, serve
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import ONLY_WINDOW, TEXT, computed, manager
from tests.rigs.process_ends import SECONDS

TIER = {"num_cpu_blocks": 90, "cpu_write_policy": "write_through", "max_load_share": 1.0}
WHOLE = TEXT[:16]  # four blocks, and nothing behind them


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    """TEXT is cached, with its checkpoint, by an engine whose kernels write in place."""
    with manager(num_gpu_units=(6, 12), state_copy=True, **TIER) as made:
        made.release(computed(made, "text", TEXT))
        yield made
        assert_nothing_left(made)


def assert_nothing_left(cache: PrefixCacheManager) -> None:
    cache.check_invariants()
    rows = cache._books.rows
    assert rows is not None
    assert not any(pool.pool.count(owner) for pool in rows.checkpoints.pools for owner in (TASK, REQUEST))
    assert not any(pool.num_pinned for pool in rows.checkpoints.pools)


def match_of(cache: PrefixCacheManager, name: str, tokens: Sequence[int] = TEXT) -> tuple[Request, Match]:
    request = Request(request_id=name, prompt_token_ids=list(tokens))
    match = cache.match(request)
    cache.check_invariants()
    return request, match


def units_of(cache: PrefixCacheManager, row: int) -> list[int]:
    """Of the one checkpoint."""
    rows = cache._books.rows
    assert rows is not None
    there = rows.checkpoints.coldest(0)
    assert there is not None
    return rows.checkpoints.unit_ids(there)[row].tolist()


class TestStates:
    def test_a_request_has_the_state_in_a_slot_of_its_own(self, cache: PrefixCacheManager) -> None:
        """The same bytes; what is written there later changes no checkpoint, and `allocate` gives no other slot."""
        (kept,) = units_of(cache, 0)
        state = cache.ranks.kv_views(0)[1]["s"]
        state[kept] = np.arange(4)
        request, match = match_of(cache, "again")
        match = match.poll()
        assert (match.ready, match.num_tokens) == (True, 16)
        (own,) = match.tables[0].block_ids
        assert own != kept and np.array_equal(state[own], np.arange(4))
        assert cache.rows.allocate(request, 1).tables[0].block_ids == []
        state[own] = 0
        assert np.array_equal(state[kept], np.arange(4))
        cache.commit(request, 18)
        cache.check_invariants()
        cache.release(request)

    def test_who_does_not_wait_has_no_hit(self, cache: PrefixCacheManager) -> None:
        """It computes all of its prompt; the copy that comes later is nobody's."""
        held = Held(cache, (TaskKind.COPY,))
        request, match = match_of(cache, "again")
        assert (match.num_tokens, match.num_coming_tokens, match.tables[0].block_ids) == (0, 16, [])
        assert len(cache.rows.allocate(request, 5).tables[0].block_ids) == 1
        match = match.poll()
        assert (match.num_tokens, match.tables[1].block_ids) == (0, [])
        cache.check_invariants()
        held.go()
        cache.check_invariants()
        cache.release(request)

    def test_a_copy_that_fails_is_no_hit(self, cache: PrefixCacheManager) -> None:
        """The cause is told; the next match tries again."""
        held = Held(cache, (TaskKind.COPY,))
        request, match = match_of(cache, "again")
        held.go(lambda _: True)
        match = match.poll()
        assert (match.ready, match.num_tokens) == (True, 0) and "failed" in str(cache.explain("again"))
        cache.release(request)
        request, match = match_of(cache, "once more")
        held.go()
        assert match.poll().num_tokens == 16
        cache.release(request)

    def test_a_copy_that_has_come_without_memory_to_note_it_is_no_hit(
        self, cache: PrefixCacheManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Its slot is nobody's again."""
        held = Held(cache, (TaskKind.COPY,))
        request, match = match_of(cache, "again")
        rows = cache._books.rows
        assert rows is not None

        def fail(*_: object) -> None:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(rows.checkpoints.pools[0].pool, "hand_over", fail)
            held.go()
        assert match.poll().num_tokens == 0
        cache.release(request)

    def test_without_a_slot_there_is_no_hit(self, cache: PrefixCacheManager) -> None:
        """`explain` says what was missing."""
        others = [Request(request_id=f"runs {number}", prompt_token_ids=[number] * 5) for number in range(5)]
        for each in others:
            cache.match(each)
            cache.rows.allocate(each, 2)
        request, match = match_of(cache, "again")
        assert (match.ready, match.num_tokens) == (True, 0)
        assert "no slot into which its state could be copied" in str(cache.explain("again"))
        for each in (*others, request):
            cache.release(each)

    @pytest.mark.parametrize("way", ["poll", "wait", "call"])
    def test_it_is_copied_when_its_load_has_come(self, cache: PrefixCacheManager, way: str) -> None:
        """Whoever waits hears of both."""
        for number in range(6):
            cache.release(computed(cache, f"other {number}", [100 + number] * 18))
        held, called = Held(cache, (TaskKind.SWAP_IN, TaskKind.COPY)), threading.Event()
        request, match = match_of(cache, "again")
        assert len(held.tasks) == 2 and match.num_coming_tokens == 16
        if way == "call":
            match.on_ready(called.set)
        threads = [threading.Thread(target=match.wait, args=(SECONDS,))] if way == "wait" else []
        for thread in threads:
            thread.start()
        held.go()
        if way == "poll":
            assert match.poll().num_tokens == 0
        while not held.tasks:
            threading.Event().wait(0.001)  # until the one who waits has begun it
        assert [task.kind for task in held.tasks] == [TaskKind.COPY] and not called.is_set()
        held.go()
        for thread in threads:
            thread.join(SECONDS)
        assert way != "call" or called.wait(SECONDS)
        assert (match.poll().num_tokens, match.poll().num_cpu_tokens) == (16, 16)
        cache.release(request)

    @pytest.mark.parametrize("fails", ["the full KV", "the checkpoint", "both"])
    def test_a_failed_load_leaves_it_at_the_checkpoint_that_was_there(
        self, cache: PrefixCacheManager, fails: str
    ) -> None:
        """Whose state is copied then, also where the deeper checkpoint has come without its full KV."""
        long = [*TEXT, *range(50, 64)]
        first, match = match_of(cache, "text first")
        assert match.poll().num_tokens == 16
        cache.rows.allocate(first, 1)
        goes_on = Request(request_id="long", prompt_token_ids=long)
        match = cache.match(goes_on).wait(SECONDS)
        new = cache.rows.allocate(goes_on, 4)
        assert new.tables[0].block_ids == []
        (own,) = match.tables[0].block_ids
        cache.rows.snapshot(goes_on, 28, [own])
        cache.commit(goes_on, 32)
        cache.release(goes_on)
        cache.release(first)
        for number in range(6):
            cache.release(computed(cache, f"other {number}", [100 + number] * 18))
        first, match = match_of(cache, "text again")
        assert match.wait(SECONDS).num_tokens == 16
        held = Held(cache)
        request, match = match_of(cache, "long again", long)
        assert match.num_coming_tokens and len(held.tasks) == 2
        held.go(lambda task: fails == "both" or bool(task.units) == (fails == "the checkpoint"))
        assert match.wait(SECONDS).num_tokens == 16
        for each in (request, first):
            cache.release(each)

    @pytest.mark.parametrize("way", ["call", "release in the call"])
    def test_who_asks_to_be_called_after_its_loads_have_come_is_called_after_the_copy(
        self, cache: PrefixCacheManager, way: str
    ) -> None:
        """Loads that are done at once bring nothing that could be used; the callback may let the request go."""
        for number in range(6):
            cache.release(computed(cache, f"other {number}", [100 + number] * 18))
        request, match = match_of(cache, "again")
        seen = list[tuple[bool, int]]()

        def call() -> None:
            now = match.poll()
            seen.append((now.ready, now.num_tokens))
            if way != "call":
                cache.release(request)

        match.on_ready(call)
        assert seen == [(True, 16)]
        if way == "call":
            cache.release(request)

    def test_who_waits_is_called_where_there_is_no_memory_for_the_copy(
        self, cache: PrefixCacheManager, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Nobody else would call it."""
        for number in range(6):
            cache.release(computed(cache, f"other {number}", [100 + number] * 18))
        held, called = Held(cache), threading.Event()
        request, match = match_of(cache, "again")
        match.on_ready(called.set)

        def fail(*_: object) -> bool:
            raise MemoryError

        with monkeypatch.context() as patched:
            patched.setattr(cache._requests.matcher, "copy_state", fail)
            held.go()
        assert called.is_set() and match.poll().num_coming_tokens == 16
        cache.release(request)

    @pytest.mark.parametrize("end", ["release", "reset"])
    def test_it_goes_while_its_state_is_copied(self, cache: PrefixCacheManager, end: str) -> None:
        """What the copy holds is free when the rank has answered, and not before."""
        held = Held(cache, (TaskKind.COPY,))
        request, match = match_of(cache, "again")
        if end == "reset":
            cache.reset()
            assert match.poll().num_tokens == 0
        cache.release(request)
        cache.check_invariants()
        rows = cache._books.rows
        assert rows is not None and rows.checkpoints.pools[0].pool.count(TASK) == 1
        held.go()

    def test_it_does_not_run_ahead(self, cache: PrefixCacheManager) -> None:
        """Its state would be copied before it has come: the match is cut to what is there."""
        for number in range(6):
            cache.release(computed(cache, f"other {number}", [100 + number] * 18))
        held = Held(cache)
        request, match = match_of(cache, "again")
        cache.rows.allocate(request, 5, ahead_of_loads=True)
        assert (match.poll().num_tokens, match.poll().coming_block_ids) == (0, ())
        held.go()
        cache.release(request)

    def test_a_copy_that_nobody_has_seen_is_room_for_its_own_request(self, cache: PrefixCacheManager) -> None:
        """Also where it asks to run ahead, which it does not."""
        others = [Request(request_id=f"runs {number}", prompt_token_ids=[number] * 5) for number in range(4)]
        for each in others:
            cache.match(each)
            cache.rows.allocate(each, 2)
        held = Held(cache, (TaskKind.COPY,))
        request, match = match_of(cache, "again")
        assert match.num_coming_tokens == 16
        held.go()
        new = cache.rows.allocate(request, 1, ahead_of_loads=True)
        assert len(new.tables[0].block_ids) == 1 and match.poll().num_tokens == 0
        for each in (*others, request):
            cache.release(each)


@pytest.mark.parametrize("fields", [{}, {"num_cpu_blocks": 160}], ids=["gpu", "tiers"])
def test_a_model_that_writes_in_place(fields: dict[str, Any]) -> None:
    """All logits are those from scratch, bit by bit, though every request writes where it has read."""
    engine = Float64Engine(seed=8, num_gpu_blocks=60, num_gpu_units=(9, 24, 30), state_copy=True, **fields)
    with engine.cache:
        assert serve(engine, 150, preempts=0.03) == 150
        assert engine.num_hits > 60
        assert not fields or engine.num_cpu_tokens > 100


@pytest.mark.processes
def test_ranks_copy_states() -> None:
    """Two of them, each its own."""
    engine = Float64Engine(
        seed=9, num_gpu_blocks=45, num_gpu_units=(9, 18, 24), num_cpu_blocks=200, state_copy=True,
        transfer_client="processes", transfer=TransferConfig(tp_size=2),
    )  # fmt: skip
    with engine.cache:
        assert serve(engine, 100) == 100
        assert engine.num_hits > 20 and engine.num_cpu_tokens > 0


@pytest.fixture
def windows() -> Iterator[PrefixCacheManager]:
    """WHOLE is cached, and two checkpoints of it: where its last block begins, and where that ends."""
    with manager(ONLY_WINDOW, recompute_last_token=True) as made:
        cache_whole(made)
        yield made
        assert_nothing_left(made)


def cache_whole(cache: PrefixCacheManager) -> None:
    request = Request(request_id="whole", prompt_token_ids=WHOLE)
    cache.match(request)
    cache.rows.allocate(request, 4)
    cache.commit(request, 16)
    cache.release(request)


class TestWindows:
    def test_the_last_token_alone_is_computed(self, windows: PrefixCacheManager) -> None:
        """Its block and the last unit of its window are the request's own copies, of all tokens but the last."""
        key = windows.ranks.kv_views(0)[1]["key"]
        for unit in range(len(key)):
            key[unit] = unit + 1
        held = Held(windows, (TaskKind.COPY,))
        request, match = match_of(windows, "again", WHOLE)
        (last,) = [int(task.source_ids[0]) for task in held.tasks if task.row]
        held.go()
        match = match.poll()
        assert (match.num_tokens, len(match.block_ids)) == (15, 4)
        (table,) = match.tables
        own = table.block_ids[-1]
        assert table.first_block + len(table.block_ids) == 4 and own != last
        assert np.all(key[own][:3] == last + 1) and np.all(key[own][3:] == own + 1)
        assert len(windows.rows.allocate(request, 0).block_ids) == 0
        windows.commit(request, 16)
        windows.check_invariants()
        request.append_output([5])
        new = windows.rows.allocate(request, 1)
        assert new.tables[0].first_block == 4
        windows.commit(request, 17)
        windows.release(request)

    @pytest.mark.parametrize("fails", ["the block", "the unit"])
    def test_a_copy_that_fails_leaves_the_whole_last_block_to_compute(
        self, windows: PrefixCacheManager, fails: str
    ) -> None:
        """One without the other is worth nothing."""
        held = Held(windows, (TaskKind.COPY,))
        request, match = match_of(windows, "again", WHOLE)
        assert (match.num_tokens, match.num_coming_tokens) == (12, 3)
        held.go(lambda task: bool(task.row) == (fails == "the unit"))
        match = match.poll()
        assert (match.num_tokens, len(match.block_ids)) == (12, 3)
        windows.release(request)

    def test_a_prompt_of_one_block_is_copied_whole(self) -> None:
        """No checkpoint lies in front of it, and none is needed."""
        with manager(ONLY_WINDOW, recompute_last_token=True) as cache:
            first = Request(request_id="first", prompt_token_ids=TEXT[:4])
            cache.match(first)
            cache.rows.allocate(first, 1)
            cache.commit(first, 4)
            cache.release(first)
            request, match = match_of(cache, "again", TEXT[:4])
            match = match.wait(SECONDS)
            assert (match.num_tokens, len(match.block_ids)) == (3, 1)
            assert [(table.first_block, len(table.block_ids)) for table in match.tables] == [(0, 1)]
            cache.check_invariants()
            cache.commit(request, 4)
            cache.release(request)
            assert_nothing_left(cache)

    def test_without_a_checkpoint_at_the_end_the_block_is_computed(self) -> None:
        """An answer went on from there: the last unit of the window has slid out."""
        with manager(ONLY_WINDOW, recompute_last_token=True) as cache:
            request = Request(request_id="first", prompt_token_ids=WHOLE)
            cache.match(request)
            cache.rows.allocate(request, 4)
            cache.commit(request, 16)
            for _ in range(8):
                request.append_output([3])
                if request.num_tokens % 4 == 1:
                    cache.rows.allocate(request, 1)
                cache.commit(request, request.num_tokens)
            cache.release(request)
            request, match = match_of(cache, "again", WHOLE)
            assert (match.ready, match.num_tokens) == (True, 12)
            cache.release(request)
            assert_nothing_left(cache)

    def test_without_a_unit_it_is_computed(self) -> None:
        """A request that runs holds all but those of the very checkpoint, which is no room for a copy of itself."""
        with manager(ONLY_WINDOW, recompute_last_token=True, num_gpu_blocks=40, num_gpu_units=(9,)) as cache:
            cache_whole(cache)
            running = Request(request_id="runs", prompt_token_ids=[9] * 40)
            cache.match(running)
            rows = cache._books.rows
            assert rows is not None
            cache.rows.allocate(running, rows.checkpoints.pools[0].pool.num_free)
            request, match = match_of(cache, "again", WHOLE)
            assert (match.ready, match.num_tokens) == (True, 12)
            cache.release(running)
            cache.release(request)
            assert_nothing_left(cache)
