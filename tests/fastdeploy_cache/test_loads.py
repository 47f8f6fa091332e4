"""Loads from the CPU tier: which are started, who waits how, what is called off."""

from __future__ import annotations

import asyncio

import pytest

from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel, LiveRequest

A, B, C = ([base + i for i in range(100)] for base in (1000, 2000, 3000))


def with_copies(**settings: object) -> CacheModel:
    """40 tokens of A, 10 blocks, are in the CPU tier; the first 8 of them are on the GPU too."""
    model = CacheModel(4, 12, 40, **settings)  # type: ignore[arg-type]
    model.serve_and_copy(A[:40], B[:40])
    return model


def load_in_two(model: CacheModel) -> LiveRequest:
    """A request that waits for two loads: another one's, and one of its own behind that."""
    model.must_match(A[:25])
    live = model.must_match(A[:41])
    assert len(live.match.load_ids) == len(model.client.tasks) == 2
    return live


# -- which are started


@pytest.mark.parametrize(("min_load_tokens", "num_coming"), [(0, 32), (29, 32), (32, 32), (33, 0), (36, 0)])
def test_fewer_tokens_than_the_minimum_are_computed(min_load_tokens: int, num_coming: int) -> None:
    """The limit is a number of whole blocks, rounded up; what is not loaded is said."""
    model = with_copies(min_load_tokens=min_load_tokens)
    match = model.must_match(A[:41]).match
    assert (match.num_tokens, match.num_coming_tokens, match.num_unloaded_tokens) == (8, num_coming, 32 - num_coming)
    assert match.ready is (num_coming == 0)
    model.finish()


@pytest.mark.parametrize(("max_load_share", "num_coming"), [(1.0, 32), (0.67, 32), (0.66, 0), (0.1, 0), (0.0, 0)])
def test_more_than_the_share_of_the_pool_is_not_loaded(max_load_share: float, num_coming: int) -> None:
    """Eight of twelve blocks: all or nothing, never the part that would be inside the limit."""
    model = with_copies(max_load_share=max_load_share)
    match = model.must_match(A[:41]).match
    assert (match.num_coming_tokens, match.num_unloaded_tokens) == (num_coming, 32 - num_coming)
    assert len(model.client.tasks) == (num_coming > 0)
    model.finish()


@pytest.mark.parametrize(("num_tokens", "num_coming"), [(48, 32), (45, 32), (41, 32)])
def test_a_load_that_fits_beside_the_rest_of_the_prompt_is_started(num_tokens: int, num_coming: int) -> None:
    """Up to the last block of the pool; the rest can be allocated while the load is in flight."""
    model = with_copies()
    live = model.must_match(A[:40] + C[: num_tokens - 40])
    assert live.match.num_coming_tokens == num_coming
    assert model.run_ahead(live, -(-num_tokens // 4) - 10)
    model.finish()


def test_a_load_that_does_not_fit_beside_the_rest_is_not_started() -> None:
    """Another request holds one block too many: nothing is loaded in part."""
    model = with_copies()
    assert model.allocate(model.must_match(C[:4]), 1)
    live = model.must_match(A[:40] + C[:8])
    assert live.match.num_coming_tokens == 0
    assert live.match.num_tokens + live.match.num_unloaded_tokens == 40
    fits = model.must_match(A[:40] + B[:3])
    assert fits.match.num_tokens + fits.match.num_coming_tokens == 40
    assert fits.match.num_unloaded_tokens == 0
    model.finish()


def test_a_full_queue_starts_nothing_and_is_counted() -> None:
    """The match says what it left, statistics and metrics that it was refused; a free queue loads again."""
    model = with_copies()
    model.client.max_tasks[TaskKind.SWAP_IN] = 0
    live = model.must_match(A[:41])
    assert (live.match.ready, live.match.num_tokens, live.match.num_unloaded_tokens) == (True, 8, 32)
    assert not model.client.tasks
    assert model.cache.stats().num_refused_transfers == {"swap_in": 1, "swap_out": 0, "copy": 0}
    samples = {
        sample.labels["kind"]: sample.value
        for family in model.cache.metrics.collect()
        for sample in family.samples
        if sample.name == "fastdeploy_cache_refused_tasks_total"
    }
    assert samples == {"swap_in": 1, "swap_out": 0, "copy": 0}
    model.client.max_tasks[TaskKind.SWAP_IN] = 1
    assert model.must_match(A[:41]).match.num_coming_tokens == 32
    model.finish()


def test_a_rank_that_is_down_is_no_full_queue() -> None:
    """Nothing is loaded, and nothing is counted as refused."""
    model = with_copies()
    model.client.up = False
    assert model.must_match(A[:41]).match.num_unloaded_tokens == 32
    assert model.cache.stats().num_refused_transfers["swap_in"] == 0
    model.finish()


# -- who waits how


def test_on_ready_of_a_ready_match_calls_at_once() -> None:
    """Nothing is on its way."""
    model, calls = with_copies(), []
    model.must_match(B[:9]).match.on_ready(lambda: calls.append(1))
    assert calls == [1]
    model.finish()


@pytest.mark.parametrize("error", [None, "rank 0 died"])
def test_on_ready_is_called_once_after_both_loads_and_may_call_the_cache(error: str | None) -> None:
    """Not after the first of two, with whatever result, and without the lock."""
    model = with_copies()
    live = load_in_two(model)
    seen: list[int] = []

    def use_the_cache() -> None:
        model.check()
        seen.append(live.match.wait(0).num_tokens)
        seen.append(len(model.cache.allocate(live.request, 0)))

    live.match.on_ready(use_the_cache)
    model.client.land()
    assert seen == []
    model.client.land(error)
    assert seen == [40 if error is None else 24, 0]
    model.client.land_all()
    assert len(seen) == 2
    model.finish()


def test_a_match_does_not_wait_for_a_load_behind_its_end() -> None:
    """Another request's longer load of the same prompt is none of its business."""
    model, calls = with_copies(), []
    load_in_two(model)
    live = model.must_match(A[:25])
    live.match.on_ready(lambda: calls.append(1))
    model.client.land()
    assert live.match.poll().ready
    assert calls == [1]


def test_arrived_lets_other_tasks_of_the_loop_run() -> None:
    """The load ends in another task of the same loop, which so has run meanwhile."""
    model = with_copies()
    live = model.must_match(A[:41])

    async def land() -> int:
        model.client.land_all()
        return 1

    async def both() -> tuple[int, int]:
        match, landed = await asyncio.gather(live.match.arrived(60.0), land())
        return match.num_tokens, landed

    assert asyncio.run(both()) == (40, 1)
    model.finish()


def test_arrived_ends_at_its_deadline_with_the_match_cut() -> None:
    """What did not arrive is no part of the match; the load itself goes on and joins the tree."""
    model = with_copies()
    live = model.must_match(A[:41])
    match = asyncio.run(live.match.arrived(0.001))
    assert (match.num_tokens, match.ready) == (8, True)
    model.client.land_all()
    assert live.match.poll().num_tokens == 8
    assert model.must_match(A[:41]).match.num_gpu_tokens == 40
    model.finish()


def test_a_cancelled_arrived_cuts_nothing() -> None:
    """The awaiting task goes; the match still gets its load, also when it ends after the loop is closed."""
    model = with_copies()
    live = model.must_match(A[:41])

    async def cancel() -> None:
        waiting = asyncio.ensure_future(live.match.arrived(60.0))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(cancel())
    assert live.match.poll().num_coming_tokens == 32
    model.client.land_all()
    assert live.match.poll().num_tokens == 40
    model.finish()


# -- what is called off


def test_the_load_of_a_request_that_goes_is_cancelled() -> None:
    """It was the only one that waited."""
    model = with_copies()
    live = model.must_match(A[:41])
    model.release(live)
    assert model.client.cancelled == set(live.match.load_ids) != set()
    with pytest.raises(RequestError):
        live.match.wait(0)
    model.finish()


def test_a_load_that_another_waits_for_is_not_cancelled() -> None:
    """Only with the last of them; one that has settled without it does not count."""
    model = with_copies()
    first, second, third = (model.must_match(A[:41]) for _ in range(3))
    model.release(first)
    assert not model.client.cancelled
    model.settle(third)
    model.release(second)
    assert model.client.cancelled == set(second.match.load_ids)
    model.finish()


def test_a_load_that_another_runs_ahead_of_is_not_cancelled() -> None:
    """That one computes on its blocks already."""
    model = with_copies()
    waiting, ahead = model.must_match(A[:41]), model.must_match(A[:41])
    assert model.run_ahead(ahead, 1)
    model.release(waiting)
    assert not model.client.cancelled
    model.client.land_all()
    model.compute(ahead, 41)
    model.finish()


def test_the_upper_load_of_two_stays_when_its_own_request_waits() -> None:
    """Who loaded more behind another's load goes: only the part that is nobody else's is cancelled."""
    model = with_copies()
    live = load_in_two(model)
    upper, lower = live.match.load_ids
    model.release(live)
    assert model.client.cancelled == {lower}
    assert model.live[0].match.load_ids == (upper,)
    model.finish()


@pytest.mark.parametrize("cancelled_ends", ["first", "last"])
@pytest.mark.parametrize("it_succeeds", [True, False])
def test_a_match_after_a_cancel_loads_afresh(cancelled_ends: str, it_succeeds: bool) -> None:
    """Whichever of the two loads ends first, and whether or not the cancelled one had begun: the right content."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40], B[:88])
    model.release(model.must_match(A[:29]))
    live = model.must_match(A[:41])
    assert live.match.num_coming_tokens == 32
    assert len(model.client.tasks) == 2
    assert not set(live.match.load_ids) & model.client.cancelled
    if it_succeeds:
        model.client.cancelled.clear()
    if cancelled_ends == "last":
        model.client.tasks.rotate(1)
    for _ in range(2):
        model.client.land()
        model.check()
    assert len(model.settle(live)) == 10
    assert model.cache.stats().gpu.num_in_flight == 0
    model.finish()


def test_a_match_on_a_block_that_goes_out_keeps_it() -> None:
    """Its copy ends clean: the block can be evicted afterwards and hits from the CPU tier."""
    model = CacheModel(4, 12, 40)
    model.serve(A[:40], stays=False, patient=False)
    assert [task.kind for task in model.client.tasks] == [TaskKind.SWAP_OUT]
    live = model.must_match(A[:41])
    assert (live.match.num_gpu_tokens, live.match.ready) == (40, True)
    model.client.land_all()
    assert model.cache.stats().cpu.num_cached == 10
    model.settle(live)
    model.release(live)
    model.serve_and_copy(B[:40])
    assert model.cache.stats().gpu.num_evicted_by_kind == (8, 0)
    assert model.must_match(A[:41]).match.num_coming_tokens == 32
    model.finish()


def test_a_match_on_blocks_that_come_in_shares_the_load() -> None:
    """Each with its own deadline: one gives up, the other gets them, and there was one task."""
    model = with_copies()
    first, second = model.must_match(A[:41]), model.must_match(A[:29])
    assert first.match.load_ids == second.match.load_ids
    assert len(model.client.tasks) == 1
    assert second.match.wait(0).num_tokens == 8
    model.check()
    model.client.land_all()
    assert (first.match.wait(0).num_tokens, second.match.wait(0).num_tokens) == (40, 8)
    model.check()
    model.finish()


def test_what_comes_home_of_a_cancelled_load_is_coming() -> None:
    """Another request loads the same blocks afresh: one of the two sets of ids comes home."""
    model = CacheModel(1, 20, 40)
    model.serve_and_copy(A[:8], B[:20])
    model.release(model.must_match(A[:9]))
    model.must_match(A[:9])
    assert refusal(model, 20) == (16, 8)


def test_what_comes_home_after_a_reset_is_coming() -> None:
    """The load of a request that still waits joins nothing: its ids go home."""
    model = CacheModel(1, 20, 40)
    model.serve_and_copy(A[:8], B[:20])
    model.must_match(A[:9])
    model.reset()
    assert refusal(model, 20) == (8, 8)


def refusal(model: CacheModel, num_blocks: int) -> tuple[int, int]:
    """What a prompt of as many blocks is refused with: missing, coming."""
    live = model.must_match(C[:num_blocks])
    with pytest.raises(OutOfBlocksError) as refused:
        model.cache.allocate(live.request, num_blocks)
    return refused.value.missing, refused.value.coming


def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """It is logged; the load lands, others are called, and the next load works."""
    model, calls = with_copies(), list[str]()
    first, second = model.must_match(A[:41]), model.must_match(A[:41])

    def broken() -> None:
        raise RuntimeError("the user's own")

    first.match.on_ready(broken)
    second.match.on_ready(lambda: calls.append("called"))
    model.client.land_all()
    assert calls == ["called"] and "user_callback_failed" in caplog.text
    first.match.on_ready(broken)
    assert first.match.wait(0).num_tokens == second.match.wait(0).num_tokens == 40
    model.finish()
