"""A request of a hybrid model that uses a checkpoint before its load has come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.life_cycle import TierName
from fastdeploy_cache.requests.match import Match
from fastdeploy_cache.requests.tables import RowBlocks
from fastdeploy_cache.transfer_manager.task import TransferTask
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import ONLY_WINDOW, TEXT, computed, manager
from tests.rigs.row_flight import replayed

LONG = [*TEXT, *range(50, 64)]  # goes on behind TEXT: eight blocks
FIELDS = {"num_cpu_blocks": 90, "cpu_write_policy": "write_through", "num_gpu_units": (6, 12), "max_load_share": 1.0}


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    """TEXT and LONG are in the CPU tier alone, with their checkpoints."""
    with manager(**FIELDS) as made:
        for name, tokens in (("text", TEXT), ("long", LONG)):
            made.release(computed(made, name, tokens))
        for number in range(6):
            made.release(computed(made, f"other {number}", [100 + number] * 18))
        yield made
        made.check_invariants()
        assert not any(made.stats().num_failed_steps.values())
        rows = made._books.rows
        assert rows is not None and not any(pool.pool.count(TASK) for pool in rows.checkpoints.pools)
        assert not made.stats().num_transfers_in_flight


def run_ahead(cache: PrefixCacheManager, name: str, tokens: list[int]) -> tuple[Request, Match, RowBlocks]:
    """What it sees of its match once it runs ahead."""
    request = Request(request_id=name, prompt_token_ids=tokens)
    match = cache.match(request)
    num_known = (match.num_tokens + match.num_coming_tokens) // 4
    new = cache.rows.allocate(request, -(-len(tokens) // 4) - num_known, ahead_of_loads=True)
    cache.check_invariants()
    return request, match.poll(), new


def test_it_has_tables_of_all_rows_at_once(cache: PrefixCacheManager) -> None:
    """Those of the checkpoint that is coming are as they will be: nothing changes when it has come and is confirmed."""
    held = Held(cache)
    request, match, new = run_ahead(cache, "again", TEXT)
    assert (match.num_tokens, match.num_coming_tokens, len(match.load_ids)) == (0, 16, 2)
    assert [(table.first_block, len(table.block_ids)) for table in match.tables] == [(3, 1), (2, 2)]
    assert [(table.first_block, len(table.block_ids)) for table in new.tables] == [(4, 1), (4, 1)]
    held.go()
    assert cache.confirm(request, 0, arrived=True)
    after = match.poll()
    assert after.block_ids == list(match.coming_block_ids) and after.tables == match.tables
    assert (after.num_cpu_tokens, after.num_coming_tokens) == (16, 0)
    cache.commit(request, 18)
    cache.release(request)


@pytest.mark.parametrize("what", ["the full KV", "the checkpoint", "both"])
def test_what_does_not_come_makes_it_worth_nothing(cache: PrefixCacheManager, what: str) -> None:
    """It publishes nothing; units that it has used are not given to others before its release."""
    held = Held(cache)
    request, match, _ = run_ahead(cache, "again", TEXT)
    used = [set(table.block_ids) for table in match.tables]
    held.go(lambda task: what == "both" or bool(task.units) == (what == "the checkpoint"))
    cache.check_invariants()
    assert not cache.confirm(request, 0, arrived=True)
    cache.commit(request, 18)
    other = Request(request_id="other", prompt_token_ids=[7] * 18)
    cache.match(other)
    new = cache.rows.allocate(other, 5)
    if what != "the full KV":
        assert not any(used[row] & set(table.block_ids) for row, table in enumerate(new.tables))
    cache.check_invariants()
    for each in (request, other):
        cache.release(each)
        cache.check_invariants()
    again = Request(request_id="once more", prompt_token_ids=TEXT)
    match = cache.match(again)
    held.go()
    assert match.poll().num_tokens == 16
    cache.release(again)


def test_a_worker_that_did_not_wait_makes_it_worth_nothing(cache: PrefixCacheManager) -> None:
    """Also where all has come by the time of `confirm`."""
    held = Held(cache)
    request, _, _ = run_ahead(cache, "again", TEXT)
    held.go()
    assert not cache.confirm(request, 0, arrived=False)
    cache.check_invariants()
    cache.release(request)


def test_a_checkpoint_that_another_request_made_meanwhile(cache: PrefixCacheManager) -> None:
    """Its load brings units that nobody takes: the request uses them to its end, and publishes nothing."""
    held = Held(cache)
    first, match, _ = run_ahead(cache, "ahead", TEXT)
    other = computed(cache, "meanwhile", TEXT)
    held.go()
    cache.check_invariants()
    assert cache.confirm(first, 0, arrived=True)
    num_made = cache.stats().checkpoints.num_made
    cache.commit(first, 18)
    cache.check_invariants()
    assert match.poll().tables == match.tables and cache.stats().checkpoints.num_made == num_made
    cache.release(other)
    cache.release(first)


@pytest.mark.parametrize("end", ["release", "reset"])
def test_it_goes_before_its_loads_have_come(cache: PrefixCacheManager, end: str) -> None:
    """No unit is free before the rank has answered."""
    held = Held(cache)
    request, match, _ = run_ahead(cache, "again", LONG)
    if end == "reset":
        cache.reset()
        cache.check_invariants()
    cache.release(request)
    cache.check_invariants()
    rows = cache._books.rows
    assert rows is not None
    for pool, table in zip(rows.checkpoints.pools, match.tables, strict=True):
        assert set(table.block_ids) <= set(pool.pool.ids_of(TASK))
    held.go()


def test_it_makes_checkpoints_of_what_it_computes_behind(cache: PrefixCacheManager) -> None:
    """After `confirm`, as any request that has gone on at a checkpoint."""
    held = Held(cache)
    request, match, new = run_ahead(cache, "more", [*TEXT[:16], *range(80, 94)])
    assert match.num_coming_tokens == 16 and match.checkpoint_tokens == (28,)
    held.go()
    assert cache.confirm(request, 0, arrived=True)
    cache.commit(request, 28)
    cache.release(request)
    assert new.tables[0].block_ids
    second, _, _ = run_ahead(cache, "and again", [*TEXT[:16], *range(80, 94)])
    assert cache.explain("and again").num_hit_tokens == 16, "no snapshot, so no checkpoint at 28"
    slots = cache._requests.active(second).rows
    assert slots is not None
    cache.commit(second, 16)
    cache.rows.snapshot(second, 28, [slots.tables[0][0]])
    cache.commit(second, 30)
    cache.release(second)
    third = Request(request_id="third", prompt_token_ids=[*TEXT[:16], *range(80, 94)])
    assert cache.match(third).num_tokens == 28
    cache.release(third)


def test_without_room_nothing_is_changed(cache: PrefixCacheManager) -> None:
    """The match waits on, and is not cut."""
    held = Held(cache)
    request = Request(request_id="again", prompt_token_ids=TEXT)
    match = cache.match(request)
    with pytest.raises(OutOfBlocksError):
        cache.rows.allocate(request, 40, ahead_of_loads=True)
    assert match.poll().num_coming_tokens == 16
    held.go()
    assert match.poll().num_tokens == 16
    cache.release(request)


def test_a_base_is_read_before_the_goal_has_come(cache: PrefixCacheManager) -> None:
    """TEXT is on the GPU, and LONG comes: where that fails, what is left of the match is TEXT's."""
    fails: Callable[[TransferTask], bool] = lambda _: True  # noqa: E731
    first = Request(request_id="text again", prompt_token_ids=TEXT)
    assert cache.match(first).poll().num_tokens == 16
    held = Held(cache)
    request, match, _ = run_ahead(cache, "long again", LONG)
    assert (match.num_tokens, match.num_coming_tokens) == (16, 12)
    assert [table.first_block for table in match.tables] == [6, 5]
    held.go(fails)
    assert not cache.confirm(request, 0, arrived=True)
    after = match.poll()
    assert after.num_tokens == 16 and [table.first_block for table in after.tables] == [3, 2]
    cache.release(first)
    cache.release(request)


def test_it_goes_before_a_rank_has_read_which_units_to_fill(cache: PrefixCacheManager) -> None:
    """It has no slot of its own yet: the tables that it gives up are not those of the task."""
    held = Held(cache)
    request = Request(request_id="again", prompt_token_ids=TEXT)
    cache.match(request)
    cache.rows.allocate(request, 0, ahead_of_loads=True)
    cache.release(request)
    cache.check_invariants()
    held.go()


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("is_near", [True, False])
def test_a_commit_before_it_is_decided_gives_nothing_up(
    cache: PrefixCacheManager, arrives: bool, is_near: bool
) -> None:
    """Its windows would slide over the checkpoints that it may have to fall back to."""
    first = Request(request_id="text again", prompt_token_ids=TEXT)
    if is_near:
        assert cache.match(first).poll().num_tokens == 16
    held = Held(cache)
    request, _, _ = run_ahead(cache, "long again", LONG)
    cache.commit(request, 32)
    cache.check_invariants()
    held.go(lambda _: not arrives)
    assert cache.confirm(request, 0, arrived=True) is arrives
    cache.check_invariants()
    cache.commit(request, 32)
    cache.release(request)
    cache.check_invariants()
    if is_near:
        cache.release(first)


def test_a_refusal_while_it_would_run_ahead_is_not_replayed_as_another(
    cache: PrefixCacheManager, tmp_path: Path
) -> None:
    """It changes nothing, while a refusal without `ahead_of_loads` settles the match."""
    held = Held(cache)
    request, other = Request(request_id="again", prompt_token_ids=TEXT), Request(request_id="o", prompt_token_ids=[9])
    match = cache.match(request)
    cache.match(other)
    with pytest.raises(OutOfBlocksError):
        cache.rows.allocate(request, 13, ahead_of_loads=True)
    held.go()
    assert match.poll().num_tokens == 16
    cache.rows.allocate(request, 1)
    cache.commit(request, 18)
    for each in (request, other):
        cache.release(each)
    outcome = replayed(cache, tmp_path / "ahead.flight")
    assert not outcome.num_different, [str(each) for each in outcome.differences]


@pytest.mark.parametrize("fails", [True, False])
@pytest.mark.parametrize("first", ["the full KV", "the checkpoint"])
def test_a_reset_between_its_loads_gives_nothing_out_that_it_reads(
    cache: PrefixCacheManager, first: str, fails: bool
) -> None:
    """What has come belongs to a past of the cache, and is the request's until its release, however the rest ends."""
    held = Held(cache)
    request, match, new = run_ahead(cache, "again", TEXT)
    waiting = held.tasks
    held.tasks = [task for task in waiting if bool(task.units) == (first == "the checkpoint")]
    rest = [task for task in waiting if task not in held.tasks]
    held.go()
    cache.reset()
    held.tasks = rest
    held.go(lambda _: fails)
    assert cache.confirm(request, 0, arrived=True) is not fails
    cache.check_invariants()
    read = {*match.coming_block_ids, *new.block_ids}
    units = [{*seen.block_ids, *own.block_ids} for seen, own in zip(match.tables, new.tables, strict=True)]
    others = list[Request]()
    with pytest.raises(OutOfBlocksError):
        while True:
            others.append(Request(request_id=f"takes {len(others)}", prompt_token_ids=[len(others)] * 4))
            cache.match(others[-1])
            given = cache.rows.allocate(others[-1], 1)
            assert not read & set(given.block_ids)
            assert not any(mine & set(table.block_ids) for mine, table in zip(units, given.tables, strict=True))
    for each in (*others, request):
        cache.release(each)


def test_one_with_windows_alone_makes_no_checkpoint_of_what_did_not_come() -> None:
    """Its units are the task's until its release."""
    fields = {**FIELDS, "num_gpu_units": (14,)}
    with manager(ONLY_WINDOW, **fields) as cache:
        for number in (0, *range(100, 106)):
            first = Request(request_id=f"first {number}", prompt_token_ids=[number] * 18)
            cache.match(first)
            cache.rows.allocate(first, 5)
            cache.commit(first, 18)
            cache.release(first)
        held = Held(cache)
        request, match, _ = run_ahead(cache, "again", [0] * 18)
        assert match.num_coming_tokens == 16
        held.go(lambda _: True)
        assert not cache.confirm(request, 0, arrived=True)
        cache.commit(request, 18)
        cache.release(request)
        cache.check_invariants()
        assert not any(cache.stats().num_failed_steps.values())


@pytest.mark.parametrize("tiers", [["cpu"], ["gpu"], ["gpu", "cpu"]])
@pytest.mark.parametrize("what", ["the full KV", "the checkpoint", "both", "nothing"])
@pytest.mark.parametrize("is_told", [True, False])
def test_tiers_may_be_lost_under_what_has_not_come(
    cache: PrefixCacheManager, what: str, is_told: bool, tiers: list[TierName]
) -> None:
    """A request that is worth nothing keeps what is on the GPU alone: not what the CPU tier had."""
    held = Held(cache)
    request, _, _ = run_ahead(cache, "again", LONG)
    held.go(lambda task: what == "both" or (bool(task.units) == (what == "the checkpoint") and what != "nothing"))
    if is_told:
        assert cache.confirm(request, 0, arrived=True) == (what == "nothing")
    held.end()
    cache.life.sleep(tiers=tiers)
    cache.check_invariants()
    cache.life.wake()
    cache.check_invariants()
    cache.release(request)
    cache.check_invariants()
    cache.release(computed(cache, "once more", LONG))


def test_what_it_has_slid_past_while_it_ran_ahead_is_given_back_when_units_are_short() -> None:
    """Until its loads are confirmed it keeps all that it has read. Behind that it can go on, also in the least pool."""
    with manager(ONLY_WINDOW, **{**FIELDS, "num_gpu_units": (6,)}) as cache:
        request = Request(request_id="text", prompt_token_ids=TEXT[:5])
        cache.match(request)
        cache.rows.allocate(request, 2)
        cache.commit(request, 5)
        cache.release(request)
        cache.life.sleep(tiers=["gpu"])
        cache.life.wake()
        held = Held(cache)
        request, match, _ = run_ahead(cache, "again", [*TEXT[:5], *range(60, 75)])
        assert match.num_coming_tokens == 4 and cache.stats().rows[0].num_private == 4
        cache.commit(request, 20)
        held.go()
        assert cache.confirm(request, 0, arrived=True)
        request.append_output([1] * 8)
        assert len(cache.rows.allocate(request, 2).block_ids) == 2
        cache.commit(request, 28)
        cache.release(request)
        cache.check_invariants()
