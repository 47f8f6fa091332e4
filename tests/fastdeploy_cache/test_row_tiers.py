"""A hybrid model with a CPU tier: what is loaded, where a match settles if it does not come, and what sleeps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import BOTH, TEXT, computed, manager

LONG = [*TEXT, *range(50, 64)]  # goes on behind TEXT: eight blocks
FIELDS = {"num_cpu_blocks": 60, "cpu_write_policy": "write_through", "num_gpu_units": (6, 12), "max_load_share": 1.0}


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    """TEXT and LONG are in the CPU tier alone; checkpoints of both."""
    made = manager(**FIELDS)
    with made:
        for name, tokens in (("text", TEXT), ("long", LONG)):
            made.release(computed(made, name, tokens))
        push_out(made)
        yield made
        made.check_invariants()


def push_out(cache: PrefixCacheManager) -> None:
    """Other prompts take the whole GPU."""
    for number in range(6):
        cache.release(computed(cache, f"other {number}", [100 + number] * 18))
        cache.check_invariants()


def match_of(cache: PrefixCacheManager, name: str, tokens: list[int]) -> tuple[Request, Any]:
    request = Request(request_id=name, prompt_token_ids=tokens)
    return request, cache.match(request)


def test_a_checkpoint_is_loaded_with_its_full_kv(cache: PrefixCacheManager) -> None:
    """The match waits for both, and has units of both rows; its hit is the CPU tier's."""
    held = Held(cache)
    request, match = match_of(cache, "again", TEXT)
    assert (match.num_tokens, match.num_coming_tokens, len(match.load_ids)) == (0, 16, 2)
    assert all(not table.block_ids for table in match.tables)
    held.go()
    match = match.poll()
    assert (match.num_tokens, match.num_cpu_tokens, match.num_coming_tokens) == (16, 16, 0)
    assert [(table.first_block, len(table.block_ids)) for table in match.tables] == [(3, 1), (2, 2)]
    layout = cache.config.rank_layout()
    assert layout is not None
    units = [layout.unit_bytes(1), layout.unit_bytes(2), layout.unit_bytes(2)]
    (hop,) = cache.explain("again").hits[0].hops
    assert hop.num_bytes == 4 * layout.block_bytes + sum(units), "full KV, one state, two blocks of the window"
    cache.release(request)


@pytest.mark.parametrize("what", ["the full KV", "the checkpoint", "both"])
def test_a_load_that_fails_leaves_the_match_at_what_was_there(cache: PrefixCacheManager, what: str) -> None:
    """Never at the first bad block: where no checkpoint was on the GPU that is the prompt's beginning. `explain` says
    why, and the next match tries again."""
    held = Held(cache)
    request, match = match_of(cache, "again", TEXT)
    held.go(lambda task: what == "both" or bool(task.units) == (what == "the checkpoint"))
    match = match.poll()
    assert (match.num_tokens, match.tables[0].block_ids) == (0, [])
    assert "its load failed" in str(cache.explain("again"))
    cache.check_invariants()
    cache.release(request)
    request, match = match_of(cache, "once more", TEXT)
    held.go()
    assert match.poll().num_tokens == 16
    cache.release(request)


def test_a_load_that_is_late_leaves_it_at_the_checkpoint_that_was_there(cache: PrefixCacheManager) -> None:
    """TEXT is on the GPU again, and its checkpoint is pinned while LONG is loaded; the request does not wait."""
    first, match = match_of(cache, "text again", TEXT)
    assert match.poll().num_tokens == 16
    held = Held(cache)
    request, match = match_of(cache, "long again", LONG)
    assert (match.num_tokens, match.num_coming_tokens) == (16, 12)
    assert [(table.first_block, len(table.block_ids)) for table in match.tables] == [(3, 1), (2, 2)]
    cache.release(first)
    new = cache.rows.allocate(request, 4)
    assert [table.first_block for table in new.tables] == [4, 4]
    assert match.poll().num_tokens == 16
    cache.check_invariants()
    held.go()
    cache.check_invariants()
    cache.release(request)
    request, match = match_of(cache, "long once more", LONG)
    assert match.num_gpu_tokens == 28, "what came late is there for others"
    cache.release(request)


def test_a_queue_with_one_place_left_takes_none_of_both(
    cache: PrefixCacheManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The full KV without its checkpoint would be loaded in vain, and the checkpoint without its full KV."""
    held = Held(cache)
    monkeypatch.setattr(cache._movement.client, "has_room", lambda _, num_tasks=1: num_tasks < 2)
    request, match = match_of(cache, "again", TEXT)
    assert match.ready and match.num_tokens == 0 and not held.num_loads
    assert "the queue of loads is full" in str(cache.explain("again"))
    cache.release(request)


def test_two_requests_wait_for_one_load(cache: PrefixCacheManager) -> None:
    """The second starts nothing; one of them may go before it has come."""
    held = Held(cache)
    first, _ = match_of(cache, "first", TEXT)
    second, match = match_of(cache, "second", TEXT)
    assert held.num_loads == 2, "one of full KV and one of the checkpoint"
    cache.release(first)
    held.go()
    assert match.poll().num_tokens == 16
    cache.release(second)
    assert held.num_loads == 2


def test_a_load_of_nobody_may_be_started_again(cache: PrefixCacheManager) -> None:
    """Its request has gone, and it is cancelled; the next one loads anew while the first is still on its way."""
    held = Held(cache)
    request, _ = match_of(cache, "gone", TEXT)
    cache.release(request)
    request, match = match_of(cache, "next", TEXT)
    assert held.num_loads == 4
    held.go()
    assert match.poll().num_tokens == 16
    cache.check_invariants()
    cache.release(request)


def test_a_reset_while_a_checkpoint_is_loaded(cache: PrefixCacheManager) -> None:
    """What comes joins nothing, and its units are free again."""
    held = Held(cache)
    request, match = match_of(cache, "again", TEXT)
    cache.reset()
    held.go()
    assert match.poll().num_tokens == 0
    cache.check_invariants()
    cache.release(request)
    assert match_of(cache, "after", TEXT)[1].num_tokens == 0


def test_a_landing_that_fails_is_kept_from_everybody(
    cache: PrefixCacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its units stay the task's. The CPU tier may be lost then, and the prompt is found no more and computed again."""
    rows = cache._books.rows
    assert rows is not None

    def fail(*_: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(rows, "end_units", fail)
        request, match = match_of(cache, "again", TEXT)
        assert match.poll().num_tokens == 0
    cache.check_invariants()
    cache.release(request)
    cache.life.sleep(tiers=["cpu"])
    cache.check_invariants()
    cache.life.wake()
    request, match = match_of(cache, "once more", TEXT)
    assert match.poll().num_tokens == 0
    cache.release(request)
    caplog.clear()  # the traceback has the cache's memory


def test_a_copy_down_that_cannot_land_is_not_counted_for_ever(
    cache: PrefixCacheManager, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Or looks at the cold end would start no more copies after some of these."""
    rows, images = cache._books.rows, cache._movement.images
    assert rows is not None and images is not None

    def fail(*_: object) -> bool:
        raise MemoryError

    with monkeypatch.context() as patched:
        patched.setattr(rows, "end_pages", fail)
        cache.release(computed(cache, "new", [300] * 18))
    assert images.num_storing == 0
    cache.check_invariants()
    caplog.clear()


@pytest.mark.parametrize("polls", [True, False])
def test_a_request_alone_is_not_stopped_by_what_it_waits_for(polls: bool) -> None:
    """Its base, its goal and the load hold all units of a row: once the load has ended it gets its own."""
    with manager(**{**FIELDS, "num_gpu_units": (3, 6)}) as cache:
        for name, tokens in (("text", TEXT), ("long", LONG), ("other", [9] * 18), ("more", [8] * 18)):
            cache.release(computed(cache, name, tokens))
        request, match = match_of(cache, "text again", TEXT)
        match.poll()
        cache.release(request)
        held = Held(cache)
        request, match = match_of(cache, "long again", LONG)
        held.go()
        if polls:
            match.poll()
        cache.rows.allocate(request, 1)
        cache.check_invariants()
        cache.release(request)


def test_a_checkpoint_that_is_larger_than_the_limit_is_not_loaded() -> None:
    """`max_load_share` counts its pages, too, and `explain` says so."""
    with manager(**{**FIELDS, "max_load_share": 0.3}) as cache:
        cache.release(computed(cache, "text"))
        push_out(cache)
        request, match = match_of(cache, "again", TEXT)
        assert (match.num_tokens, match.num_unloaded_tokens) == (0, 16)
        said = str(cache.explain("again"))
        assert "max_load_share allows 4 blocks, and it has 7" in said, said
        cache.release(request)


def test_a_row_that_has_no_units_for_it() -> None:
    """Running requests hold them all: the match goes on without, and `explain` names the row."""
    with manager(**{**FIELDS, "num_gpu_units": (2, 12)}) as cache:
        cache.release(computed(cache, "text"))
        push_out(cache)
        running = [computed(cache, f"running {number}", [200 + number] * 10) for number in range(1)]
        request, match = match_of(cache, "again", TEXT)
        assert match.num_tokens == 0
        assert "its checkpoint lacks 1 units of the row 'state'" in str(cache.explain("again"))
        cache.release(request)
        for each in running:
            cache.release(each)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective", "write_back"])
def test_each_write_policy_copies_checkpoints(policy: str) -> None:
    """After as many uses as it asks for, and with as much pressure, the prompt is served from the CPU tier."""
    with manager(**{**FIELDS, "cpu_write_policy": policy}) as cache:
        for number in range(3):
            cache.release(computed(cache, f"text {number}"))
        push_out(cache)
        request, match = match_of(cache, "again", TEXT)
        assert match.poll().num_cpu_tokens == 16
        cache.release(request)


def test_a_gpu_that_sleeps_leaves_checkpoints_in_the_cpu_tier(cache: PrefixCacheManager) -> None:
    """After it has woken they are loaded."""
    cache.life.sleep(tiers=["gpu"])
    cache.check_invariants()
    cache.life.wake()
    request, match = match_of(cache, "again", LONG)
    assert match.poll().num_cpu_tokens == 28
    cache.release(request)


def test_a_cpu_tier_that_sleeps_leaves_those_on_the_gpu(cache: PrefixCacheManager) -> None:
    """What was in the CPU tier alone is gone, and nothing is dead KV."""
    request, match = match_of(cache, "text again", TEXT)
    assert match.poll().num_tokens == 16
    cache.release(request)
    cache.life.sleep(tiers=["cpu"])
    cache.check_invariants()
    cache.life.wake()
    request, match = match_of(cache, "long again", LONG)
    assert (match.num_gpu_tokens, match.poll().num_tokens) == (16, 16)
    cache.release(request)


def test_a_cpu_tier_that_is_too_small_is_refused() -> None:
    """For a checkpoint and a block: by the constructor, with the number to give."""
    with pytest.raises(ConfigError, match="the CPU pool has 2 blocks, and a checkpoint and one block take 4; give"):
        manager(BOTH, num_cpu_blocks=2)


@pytest.mark.parametrize("policy", ["write_through", "write_through_selective"])
def test_a_session_leaves_the_gpu_with_its_units(policy: str) -> None:
    """Whether it has copies or gets them first: then it has neither blocks nor units on the GPU, and a prefetch brings
    both back before they are asked for."""
    with manager(**{**FIELDS, "cpu_write_policy": policy}) as cache:
        cache.release(computed(cache, "text", TEXT))
        cache.wait_for_transfers(10)
        held = Held(cache, (TaskKind.SWAP_OUT, TaskKind.SWAP_IN))
        cache.sessions.demote(TEXT)
        held.go()
        cache.check_invariants()
        stats = cache.stats()
        assert stats.gpu.num_free == stats.gpu.num_blocks and all(row.num_held == 0 for row in stats.rows)
        assert cache.sessions.prefetch(TEXT).num_cpu_tokens == 16
        held.go()
        request, match = match_of(cache, "again", TEXT)
        assert match.num_gpu_tokens == 16
        cache.release(request)
        cache.check_invariants()
