"""Requests that compute before the blocks that they build on have arrived."""

from __future__ import annotations

import pytest

from fastdeploy_cache.request import Image
from tests.rigs.cache_model import CacheModel, LiveRequest

A, B, C = ([base + i for i in range(100)] for base in (1000, 2000, 3000))


def with_copies(num_gpu: int = 24) -> CacheModel:
    """40 tokens of A, 10 blocks, are in the CPU tier, and little of them is on the GPU."""
    model = CacheModel(4, num_gpu, 60)
    model.serve_and_copy(A[:40])
    for text in (B, C):
        model.serve_and_copy(text[: 4 * (num_gpu // 2)])
    return model


def start_ahead(model: CacheModel, num_tokens: int = 45) -> LiveRequest:
    """A request ahead of its load, with blocks for all its tokens."""
    live = model.must_match(A[:40] + C[50 : num_tokens + 10])
    assert live.match.num_coming_tokens > 0
    assert model.run_ahead(live, -(-num_tokens // 4) - 10)
    assert live.num_assumed == 10
    return live


def compute(model: CacheModel, live: LiveRequest, num_tokens: int) -> None:
    """A step: write the blocks behind those assumed and commit, without asking how the loads are."""
    assert live.table is not None
    for block in range(live.num_assumed, num_tokens // 4):
        model.client.gpu[live.table[block]] = model.prefix(live, block + 1)
    model.cache.commit(live.request, num_tokens)


def num_found(model: CacheModel, tokens: list[int]) -> int:
    """Tokens that a new request would find on the GPU."""
    request = model.must_match(tokens)
    found = request.match.num_gpu_tokens
    model.release(request)
    return found


def test_how_long_its_loads_took_is_told_when_they_have_ended() -> None:
    """The request was counted before: its hop and the sum of all loads have their seconds from then on."""
    model = with_copies(22)
    live = start_ahead(model)
    name = live.request.request_id
    compute(model, live, 44)
    (before,) = [hit for hit in model.cache.explain(name).hits if hit.tier == "cpu"]
    model.client.land_all()
    for transfer in model.cache._requests.active(live.request).loads:
        transfer.seconds = 0.25  # a simulated copy takes no time
    assert model.cache.confirm(live.request, 0, arrived=True)
    (after,) = [hit for hit in model.cache.explain(name).hits if hit.tier == "cpu"]
    assert (before.hops[0].seconds, after.hops[0].seconds) == (0.0, 0.25) and after.num_tokens == before.num_tokens
    assert model.cache._requests.accounts.moved_by_tier()["cpu"] == 0.25
    model.check()


def test_the_block_table_is_readable_then_coming_then_new() -> None:
    """All three are told by `poll` and `allocate`, share no id, and hold the right content once the load is in."""
    model = with_copies(22)
    live = model.must_match(A[:40] + C[50:60])
    new = model.cache.allocate(live.request, 3, ahead_of_loads=True)
    match = live.match.poll()
    assert 4 * len(match.coming_block_ids) == match.num_coming_tokens > 0
    assert len(match.block_ids) + len(match.coming_block_ids) == 10
    table = [*match.block_ids, *match.coming_block_ids, *new]
    assert len(set(table)) == 13
    model.client.land_all()
    assert model.cache.confirm(live.request, 0, arrived=True)
    assert live.match.poll().block_ids == table[:10]
    model.check_readable(live, table[:10])
    model.finish()


def test_nothing_is_published_before_the_loads_have_come() -> None:
    """A commit says nothing yet; the next one after `confirm` publishes all of it."""
    model = with_copies()
    live = start_ahead(model)
    compute(model, live, 45)
    assert model.must_match(A[:40] + C[50:60]).match.num_coming_tokens <= 40
    assert not live.match.poll().ready
    model.client.land_all()
    assert model.cache.confirm(live.request, 0, arrived=True)
    model.cache.commit(live.request, 45)
    model.committed |= {model.prefix(live, n + 1) for n in range(11)}
    assert num_found(model, A[:40] + C[50:60]) == 44
    model.finish()


def test_confirm_waits_for_a_load_and_is_true_for_who_runs_ahead_of_nothing() -> None:
    """Any number of times, before and after."""
    model = with_copies()
    plain = model.must_match(B[:5])
    assert model.cache.confirm(plain.request, 0, arrived=True)
    live = start_ahead(model)
    model.client.land_all()
    assert model.cache.confirm(live.request, arrived=True)
    assert model.cache.confirm(live.request, 0, arrived=True)
    live.num_assumed = 0
    model.finish()


def test_a_failed_load_voids_the_request() -> None:
    """It publishes nothing, its blocks go home at release, and the next match works."""
    model = with_copies()
    live = start_ahead(model)
    num_cached = model.cache.stats().gpu.num_cached
    model.client.land("rank 0 died")
    compute(model, live, 45)
    assert not model.cache.confirm(live.request, 0, arrived=True)
    model.cache.commit(live.request, 45)
    assert model.cache.stats().gpu.num_cached == num_cached
    model.check()
    model.confirm(live)
    assert model.cache.stats().gpu.num_private == model.cache.stats().gpu.num_in_flight == 0
    again = model.must_match(A[:41])
    model.client.land_all()
    assert len(model.settle(again)) == 10
    model.finish()


@pytest.mark.parametrize("released_first", [True, False])
@pytest.mark.parametrize("error", [None, "rank 0 died"])
def test_a_deadline_voids_and_the_ids_stay_the_loads(released_first: bool, error: str | None) -> None:
    """The late load's destinations are given to nobody before it has ended, nor before the request is released."""
    model = with_copies()
    live = start_ahead(model)
    coming = set(live.match.poll().coming_block_ids)
    assert not model.cache.confirm(live.request, 0, arrived=True)
    steps = [lambda: model.confirm(live), lambda: model.client.land(error)]
    for step in steps if released_first else steps[::-1]:
        other = model.must_match(B[60:70])
        num_free = model.cache.stats().gpu.num_free
        assert model.allocate(other, num_free)
        assert not set(other.table or ()) & coming
        model.release(other)
        step()
        model.check()
    model.client.land_all()
    assert model.cache.stats().gpu.num_in_flight == 0
    assert num_found(model, A[:41]) == (40 if error is None else 40 - 4 * len(coming))
    model.finish()


def test_ids_superseded_by_computed_blocks_are_not_reused_before_the_release() -> None:
    """Another request computed the same blocks: the tree has those, the one ahead goes on with its own."""
    model = with_copies()
    live = start_ahead(model)
    coming = set(live.match.poll().coming_block_ids)
    other = model.must_match(A[:41])
    missing = 11 - len(model.settle(other))
    assert missing
    assert model.allocate(other, missing)
    model.compute(other, 41)
    model.client.land()
    model.check()
    assert model.cache.confirm(live.request, 0, arrived=True)
    model.check_readable(live, list(live.table or ())[:10])
    model.release(other)
    hungry = model.must_match(B[60:70])
    assert model.allocate(hungry, model.cache.stats().gpu.num_free)
    assert not set(hungry.table or ()) & coming
    assert model.cache.stats().gpu.num_in_flight == len(coming)
    model.confirm(live)
    model.release(live)
    assert model.cache.stats().gpu.num_in_flight == 0
    model.finish()


@pytest.mark.parametrize("event", ["reset", "kv_lost"])
@pytest.mark.parametrize("when", ["load in flight", "load ended"])
def test_a_reset_or_loss_while_ahead(event: str, when: str) -> None:
    """Nothing is published, no id is given out while the request has it, and everything goes home."""
    model = with_copies()
    live = start_ahead(model)
    table = set(live.table or ())
    if when == "load ended":
        model.client.land_all()
    getattr(model, event)()
    model.client.land_all()
    model.check()
    compute(model, live, 45)
    model.cache.confirm(live.request, 0, arrived=True)
    model.cache.commit(live.request, 45)
    assert num_found(model, A[:40] + C[50:60]) == 0
    other = model.must_match(B[60:70])
    assert model.allocate(other, model.cache.stats().gpu.num_free)
    assert not set(other.table or ()) & table
    model.cache.release(live.request)
    model.live.remove(live)
    model.check()
    model.finish()
    assert model.cache.stats().gpu.num_free + model.cache.stats().gpu.num_cached == model.num_gpu


@pytest.mark.parametrize("error", [None, "rank 0 died"])
def test_release_while_ahead(error: str | None) -> None:
    """The load is called off; it ends one way or the other without leaving anything."""
    model = with_copies()
    live = start_ahead(model)
    model.release(live)
    assert model.client.cancelled == set(live.match.load_ids)
    model.check()
    model.client.cancelled.clear()
    model.client.land(error)
    model.check()
    assert model.cache.stats().gpu.num_in_flight == 0
    model.finish()


def test_two_requests_ahead_of_one_load() -> None:
    """Its ids stay until the second one has gone; both publish."""
    model = with_copies()
    first, second = start_ahead(model), start_ahead(model)
    assert first.match.load_ids == second.match.load_ids
    model.client.land_all()
    for live in (first, second):
        model.confirm(live)
        compute(model, live, 45)
        model.committed |= {model.prefix(live, n + 1) for n in range(11)}
    model.release(first)
    model.check()
    model.check_readable(second, list(second.table or ())[:10])
    assert num_found(model, A[:40] + C[50:60]) == 44
    model.finish()


def test_the_table_stays_while_one_of_two_loads_has_landed() -> None:
    """What `poll` tells is the same table before, between and after: no block twice, none missing."""
    model = with_copies()
    model.must_match(A[:25])
    live = model.must_match(A[:41])
    assert len(live.match.load_ids) == 2
    model.cache.allocate(live.request, 1, ahead_of_loads=True)
    tables = []
    for _ in range(3):
        match = live.match.poll()
        tables.append([*match.block_ids, *match.coming_block_ids])
        model.land(None, 1)
        model.check()
    assert tables == [tables[0]] * 3
    assert len(set(tables[0])) == 10
    model.check_readable(live, tables[0])
    model.finish()


def test_with_nothing_coming_it_is_a_plain_allocate() -> None:
    """On a cold and on a whole hit, and where the load has ended or failed between match and allocate."""
    model = with_copies()
    for tokens, num_readable in ((B[60:70], 0), (C[:41], 40)):
        live = model.must_match(tokens)
        new = model.cache.allocate(live.request, 3, ahead_of_loads=True)
        match = live.match.poll()
        assert (match.coming_block_ids, len(match.block_ids), len(new)) == ((), num_readable // 4, 3)
        model.release(live)
    for error in ("rank 0 died", None):
        live = model.must_match(A[:41])
        model.client.land(error)
        assert len(model.cache.allocate(live.request, 1, ahead_of_loads=True)) == 1
        match = live.match.poll()
        assert (match.ready, match.coming_block_ids) == (True, ())
        assert (match.num_tokens == 40) is (error is None)
        assert model.cache.confirm(live.request, 0, arrived=True)
        model.release(live)
    model.finish()


@pytest.mark.parametrize("offset", [2, 10, 18, 26])
@pytest.mark.parametrize("error", [None, "rank 0 died"])
def test_ahead_of_an_image_that_is_partly_on_the_gpu(offset: int, error: str | None) -> None:
    """A match never ends inside it; the table holds every block once, in order."""
    model, images = CacheModel(4, 14, 60), [Image(offset, 12, b"cat")]
    model.serve(A[:40], stays=False, patient=True, images=images)
    model.client.land_all()
    model.serve_and_copy(B[:36])
    live = model.must_match(A[:41], images=images)
    assert live.match.num_tokens + live.match.num_coming_tokens == 40
    assert model.run_ahead(live, 1)
    assert (len(live.table or ()), live.num_assumed) == (11, 10)
    assert not images[0].offset < live.match.poll().num_tokens < images[0].end
    model.client.land(error)
    model.check()
    model.confirm(live)
    assert (live in model.live) is (error is None)
    model.finish()


def test_the_coming_ids_are_as_many_as_the_coming_tokens() -> None:
    """Also before the request runs ahead, where the match is cut back to before an image."""
    model, images = CacheModel(4, 12, 40), [Image(6, 20, b"cat")]
    model.serve(A[:40], stays=False, patient=True, images=images)
    model.client.land_all()
    model.serve_and_copy(B[:32])
    match = model.must_match(A[:41], images=images).match
    assert match.num_coming_tokens
    assert 4 * len(match.coming_block_ids) == match.num_coming_tokens


@pytest.mark.parametrize("lands", [True, False])
def test_a_copied_last_block_is_not_run_ahead_of(lands: bool) -> None:
    """A whole hit with `recompute_last_token`: its copy is part of the match where it is there, else a miss."""
    model = CacheModel(4, 12, 40, recompute_last_token=True)
    model.serve_and_copy(A[:16])
    live = model.must_match(A[:16])
    assert (live.match.num_tokens, live.match.num_coming_tokens, live.match.coming_block_ids) == (12, 3, ())
    if lands:
        model.client.land_all()
    new = model.cache.allocate(live.request, 0 if lands else 1, ahead_of_loads=True)
    match = live.match.poll()
    assert (match.ready, match.num_tokens, len(match.block_ids)) == (True, 15 if lands else 12, 4 if lands else 3)
    live.table, live.num_computed = match.block_ids + new, match.num_tokens
    assert model.cache.confirm(live.request, 0, arrived=True)
    model.compute(live, 16)
    model.finish()


def test_a_worker_that_gave_up_voids_the_step_although_the_load_came() -> None:
    """It has computed on a layer that was not in: not confirmed, nothing published, and the next match hits."""
    model = with_copies()
    live = start_ahead(model)
    compute(model, live, 45)
    model.client.land_all()
    num_cached = model.cache.stats().gpu.num_cached
    assert not model.cache.confirm(live.request, 0, arrived=False)
    model.cache.commit(live.request, 45)
    assert model.cache.stats().gpu.num_cached == num_cached
    live.num_assumed = 0
    live.table = None
    model.release(live)
    assert num_found(model, A[:41]) == 40
    model.finish()


def test_nothing_is_published_before_it_is_confirmed() -> None:
    """The loads have come, and the engine commits without asking: the request stays ahead until it does."""
    model = with_copies()
    live = start_ahead(model)
    model.client.land_all()
    num_cached = model.cache.stats().gpu.num_cached
    compute(model, live, 45)
    assert model.cache.stats().gpu.num_cached == num_cached
    model.confirm(live)
    compute(model, live, 45)
    assert model.cache.stats().gpu.num_cached > num_cached
    model.committed |= {model.prefix(live, n + 1) for n in range(11)}
    model.finish()
