"""A match whose load lacks blocks that copies in flight hold waits for them, and loads."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.errors import OutOfBlocksError, UnknownRequestError
from fastdeploy_cache.requests import room_queue
from fastdeploy_cache.requests.room_queue import RoomNeed, Taking
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.cache_model import CacheModel, LiveRequest
from tests.rigs.process_ends import SECONDS

A, B, C = (list(range(base, base + 20)) for base in (1000, 2000, 3000))


def with_copies_in_flight(**settings: object) -> CacheModel:
    """A is in the CPU tier alone; of B, which has taken the whole GPU, every block is on its way down."""
    model = CacheModel(1, 20, 60, **settings)  # type: ignore[arg-type]
    model.serve_and_copy(A)
    model.serve(B, stays=False, patient=False)
    assert model.client.tasks
    return model


def waiting(model: CacheModel, tokens: list[int] = A) -> LiveRequest:
    """Matched, and nothing of it can be loaded yet."""
    live = model.must_match(tokens)
    assert not live.match.ready and not live.match.load_ids and live.match.num_unloaded_tokens == 0
    model.check()
    return live


def shown(model: CacheModel, name: str) -> float:
    """The value of a metric without labels."""
    samples = (s for family in model.cache.metrics.collect() for s in family.samples)
    return next(s.value for s in samples if s.name == f"fastdeploy_cache_{name}")


def missed(model: CacheModel, live: LiveRequest) -> dict[Cause, int]:
    """By cause, but for the token that is always computed."""
    causes = model.cache.explain(live.request.request_id).missed_tokens()
    return {cause: num for cause, num in causes.items() if cause is not Cause.LAST}


def test_it_loads_when_the_copies_have_ended() -> None:
    """All that is cached of the prompt is a hit; what was waited for is told by `explain` and by metrics."""
    model = with_copies_in_flight()
    live = waiting(model)
    assert shown(model, "waiting_for_room") == 1
    model.client.land_all()  # the copies, and the load that they made room for
    assert model.look(live).num_cpu_tokens == 19 and live.match.ready
    assert shown(model, "waiting_for_room") == 0 and shown(model, "room_waits_total") == 1
    explanation = model.cache.explain(live.request.request_id)
    assert explanation.room_seconds > 0 and "waited" in str(explanation) and not missed(model, live)
    assert model.allocate(live, 1)
    model.finish()


def test_who_waits_in_a_thread_is_woken() -> None:
    """`wait` returns with the load's blocks, and `on_ready` calls once they are there."""
    model = with_copies_in_flight()
    live, called = waiting(model), threading.Event()
    live.match.on_ready(called.set)
    landing = threading.Thread(target=model.client.land_all)
    landing.start()
    assert live.match.wait(SECONDS).num_cpu_tokens == 19 and called.wait(SECONDS)
    landing.join(SECONDS)
    model.finish()


def test_it_waits_for_nothing_where_nothing_is_on_its_way() -> None:
    """A running request holds the blocks: the match is settled at once, for want of room."""
    model = CacheModel(1, 20, 60)
    model.serve_and_copy(A)
    assert model.allocate(model.must_match(B), 20)
    live = model.must_match(A)
    assert live.match.ready and live.match.num_unloaded_tokens == 19 and missed(model, live) == {Cause.ROOM: 19}
    assert shown(model, "room_waits_total") == 0
    model.finish()


def test_copies_that_give_back_too_little_are_not_waited_for() -> None:
    """A running request holds one block of those that the prompt needs."""
    model = CacheModel(1, 20, 60)
    model.serve_and_copy(A)
    assert model.allocate(model.must_match(C[:1]), 1)
    model.serve(B[:19], stays=False, patient=False)
    assert model.client.tasks and model.must_match(A).match.num_unloaded_tokens == 19
    model.finish()


def test_room_goes_to_who_came_first() -> None:
    """A match, an allocation and another match: as many as fit are served, in this order."""
    model = with_copies_in_flight()
    first, other = waiting(model, A[:11]), model.must_match(C[:8])
    ids: list[list[int]] = []

    def allocate() -> None:
        ids.append(model.cache.allocate(other.request, 8, wait_seconds=SECONDS))

    thread = threading.Thread(target=allocate)
    thread.start()
    while shown(model, "waiting_for_room") < 2:
        threading.Event().wait(0.001)  # until it has come: nothing tells of that
    last = waiting(model, A[:4])
    model.client.land()
    thread.join(SECONDS)
    assert len(ids[0]) == 8 and first.match.poll().load_ids
    model.client.land_all()
    assert model.look(first).num_tokens == 10 and model.look(last).num_tokens == 3
    model.check()
    model.finish()


def test_who_has_waited_takes_what_can_be_had() -> None:
    """An allocation whose time is over stands behind nobody any more: what came meanwhile is its own."""
    model = with_copies_in_flight()
    waiting(model, A[:11])
    answers: Iterator[list[int]] = iter([[], [], [7]])  # nothing can be had at first, nor when its wait begins

    def take() -> list[int]:
        if not (ids := next(answers)):
            raise OutOfBlocksError(1, 1)
        return ids

    taking = Taking(lambda: RoomNeed(0), take, lambda _: None)
    assert model.cache._requests.room.when_room(taking, 0.0, lambda: None) == [7]
    assert shown(model, "waiting_for_room") == 1
    model.client.land_all()
    model.finish()


def test_room_that_comes_as_the_time_ends_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turn that frees it comes between the end of the time and its caller's next step: the blocks are its own."""
    model = with_copies_in_flight()
    live = model.must_match(C[:8])

    def wait(_: threading.Event, timeout: float | None = None) -> bool:
        for each in model.cache._requests.room._waiting:
            each.deadline = 0.0
        model.client.land_all()  # the time has ended, and only then room comes
        return False

    with monkeypatch.context() as patched:
        patched.setattr(threading.Event, "wait", wait)
        ids = model.cache.allocate(live.request, 8, wait_seconds=SECONDS)
    assert len(ids) == 8
    live.table = [*live.match.block_ids, *ids]
    model.finish()


def test_a_match_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing happens meanwhile: its caller's wait ends with its own, and the cause is room."""
    monkeypatch.setattr(room_queue, "_MATCH_SECONDS", 0.01)
    model = with_copies_in_flight()
    live = waiting(model)
    live.match.wait(SECONDS)
    assert missed(model, live) == {Cause.ROOM: 19} and shown(model, "waiting_for_room") == 0
    model.client.land_all()
    model.finish()


def test_prompts_that_share_their_cold_beginning_all_hit() -> None:
    """What the first of them loads, the others wait for, and need no room of their own for it."""
    model = with_copies_in_flight()
    prompts = [[*A[:12], 5000 + i] for i in range(5)]
    lives = [waiting(model, prompt) for prompt in prompts]
    model.client.land_all()
    assert [model.look(live).num_tokens for live in lives] == [12] * 5
    model.finish()


def test_who_takes_blocks_before_is_told_so() -> None:
    """The match is cut to what its caller saw: late, and not for want of room."""
    model = with_copies_in_flight()
    live = waiting(model)
    with pytest.raises(OutOfBlocksError):
        model.cache.allocate(live.request, 20)
    assert not model.cache.explain(live.request.request_id).is_final
    assert live.match.wait(0).num_tokens == 0
    assert missed(model, live) == {Cause.LATE: 19} and shown(model, "waiting_for_room") == 0
    model.finish()


@pytest.mark.parametrize("end", ["release", "reset", "kv_lost", "failure", "rank", "pause"])
def test_what_ends_a_wait(end: str) -> None:
    """Nothing is loaded, nobody waits any more, and nothing is left behind."""
    model = with_copies_in_flight()
    live = waiting(model)
    if end == "release":
        model.release(live)
    elif end == "reset":
        model.reset()
        assert missed(model, live) == {Cause.RESET: 19} and live.match.poll().ready
    elif end == "kv_lost":
        model.kv_lost()
    elif end == "failure":
        while model.client.tasks and model.client.tasks[0].kind is TaskKind.SWAP_OUT:
            model.client.land("broken")  # B is in no tier but the GPU then, which can drop it
    elif end == "rank":
        model.client.up = False
        while model.client.tasks:
            model.client.land("the rank is down")
    else:
        model.client.auto = True
        model.client.land_all()
        model.cache.life.pause(SECONDS)
    model.check()
    assert shown(model, "waiting_for_room") == 0 and shown(model, "room_waits_total") == 1
    model.client.up = True
    model.finish()


def test_a_failed_copy_makes_room_as_well() -> None:
    """What could not be copied is dropped for the load, as it would be for an allocation."""
    model = with_copies_in_flight()
    live = waiting(model)
    model.client.land("broken")
    model.client.land_all()
    assert model.look(live).num_cpu_tokens == 19
    model.finish()


def test_a_release_ends_the_wait_of_an_allocation() -> None:
    """Its thread is told that the request is not matched any more, and does not wait for its time to be over."""
    model = with_copies_in_flight()
    live, told = model.must_match(C), list[Exception]()

    def allocate() -> None:
        try:
            model.cache.allocate(live.request, 20, wait_seconds=1e6)
        except UnknownRequestError as error:
            told.append(error)

    thread = threading.Thread(target=allocate)
    thread.start()
    while not shown(model, "waiting_for_room"):
        threading.Event().wait(0.001)  # until it has come: nothing tells of that
    model.release(live)
    model.client.land_all()
    thread.join(SECONDS)
    assert told and not thread.is_alive()
    model.finish()


def test_a_whole_prompt_again_needs_no_room() -> None:
    """What is on the GPU already is settled, also while others wait for room."""
    model = with_copies_in_flight()
    waiting(model)
    match = model.cache.match(Request(request_id="whole", prompt_token_ids=B))
    assert match.ready and match.num_gpu_tokens == 19
    model.cache.release(match._loads._active.request)  # type: ignore[attr-defined]
    model.finish()


def test_an_allocation_is_not_behind_its_own_match() -> None:
    """An engine that does not wait for its match, and allocates with a wait, gets all of its blocks."""
    model = with_copies_in_flight()
    live, ids = waiting(model), list[int]()
    thread = threading.Thread(target=lambda: ids.extend(model.cache.allocate(live.request, 20, wait_seconds=SECONDS)))
    thread.start()
    while not shown(model, "room_waits_total"):
        threading.Event().wait(0.001)  # until the match has given up for it: nothing tells of that
    model.client.land_all()
    thread.join(SECONDS)
    assert len(ids) == 20 and missed(model, live) == {Cause.ROOM: 19}
    model.finish()


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupted_wait_gets_nothing(monkeypatch: pytest.MonkeyPatch, is_late: bool) -> None:
    """Ctrl-C in the wait: blocks that nobody has heard of are not the request's, whether they came before or after."""
    model = with_copies_in_flight()
    live = model.must_match(C)

    def interrupt(event: threading.Event, timeout: float | None = None) -> bool:
        if is_late:
            model.client.land_all()
        raise KeyboardInterrupt

    monkeypatch.setattr(threading.Event, "wait", interrupt)
    with pytest.raises(KeyboardInterrupt):
        model.cache.allocate(live.request, 20, wait_seconds=SECONDS)
    monkeypatch.undo()
    model.client.land_all()
    model.check()
    assert model.cache.stats().gpu.num_private == 0 and shown(model, "waiting_for_room") == 0
    assert len(model.cache.allocate(live.request, 20)) == 20
    model.finish()


def test_a_request_that_runs_ahead_waits_for_no_room() -> None:
    """What it waits for is given up when it takes blocks ahead of loads."""
    model = CacheModel(1, 20, 60)
    model.serve_and_copy(A)
    model.serve(B[:12], stays=False, patient=False)
    live = waiting(model)
    assert model.run_ahead(live, 0)
    model.check()
    assert shown(model, "waiting_for_room") == 0 and not live.num_assumed
    model.finish()


def test_who_fails_in_front_does_not_keep_the_others_waiting() -> None:
    """No memory to serve the first: it gives up, the failure is counted, and the second is served."""
    model = with_copies_in_flight()
    model.steps_may_fail = True
    first, second = waiting(model, A[:11]), waiting(model, A[:9])

    def fail() -> bool:
        raise MemoryError

    first.match._loads._active.room.serve = fail  # type: ignore[attr-defined]
    model.client.land_all()
    model.check()
    assert model.look(first).num_tokens == 0 and model.look(second).num_tokens == 8
    assert model.cache.stats().num_failed_steps["settling"] == 1
    model.finish()


def test_a_refusal_behind_others_says_what_is_so_now() -> None:
    """Behind somebody who waits, and with nothing to hope for: the reason is not that of a load refused before."""
    model = with_copies_in_flight()
    holder = model.must_match(C[:1])
    waiting(model, A[:11])
    model.cache._movement.loader.refused_for = Cause.SLOWER, "of another request"
    prompt = [*A[:19], *C[:1]]
    num_coming, model.cache._requests.room._num_coming = 12, lambda: 12  # as where others hold the rest
    live = model.must_match(prompt)
    assert missed(model, live) == {Cause.ROOM: 19} and num_coming < len(prompt)
    model.release(holder)
    model.finish()
