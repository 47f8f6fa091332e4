"""A hybrid model whose copies in flight hold what others need: matches and allocations wait for it, by row."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fastdeploy_cache import Match, PrefixCacheManager, Request
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.requests.tables import RowBlocks
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_tasks import Held
from tests.rigs.hybrid_requests import TEXT, ask, computed, manager, picture, started
from tests.rigs.process_ends import SECONDS

TIER = {"num_cpu_blocks": 200, "cpu_write_policy": "write_through", "max_load_share": 1.0}
SHORT = {
    "states": {"num_gpu_blocks": 40, "num_gpu_units": (5, 30)},
    "blocks": {"num_gpu_blocks": 19, "num_gpu_units": (20, 30)},
}


@pytest.fixture(params=SHORT)
def held(request: pytest.FixtureRequest) -> Iterator[Held]:
    """TEXT is in the CPU tier alone; of four other prompts each block and checkpoint is on its way down. A request
    runs, and of one kind of room there is no more."""
    with manager(**TIER, **SHORT[request.param]) as cache:
        cache.release(computed(cache, "text", TEXT))
        for number in range(9):
            cache.release(computed(cache, f"first {number}", [50 + number] * 18))
        held = Held(cache, (TaskKind.SWAP_IN, TaskKind.SWAP_OUT))
        for number in range(4):
            cache.release(computed(cache, f"then {number}", [100 + number] * 18))
        running, _ = started(cache, "runs", [1] * 10)
        yield held
        held.go()
        held.go()
        cache.release(running)
        cache.check_invariants()
        assert not cache.stats().num_transfers_in_flight


def match_text(held: Held, name: str = "again") -> tuple[Request, Match]:
    request = Request(request_id=name, prompt_token_ids=TEXT)
    return request, held.cache.match(request)


def num_waiting(cache: PrefixCacheManager) -> float:
    samples = (s for family in cache.metrics.collect() for s in family.samples)
    return next(s.value for s in samples if s.name == "fastdeploy_cache_waiting_for_room")


def test_a_match_waits_for_room_of_each_row_and_loads(held: Held) -> None:
    """It has begun nothing before; when the copies have ended it loads, and all of the prompt is a hit."""
    request, match = match_text(held)
    assert not match.ready and match.num_coming_tokens == 16 and not held.num_loads
    assert num_waiting(held.cache) == 1
    held.cache.check_invariants()
    held.go()  # the copies
    assert held.num_loads == 2 and num_waiting(held.cache) == 0
    held.go()  # the loads that they made room for
    match = match.poll()
    assert (match.ready, match.num_cpu_tokens) == (True, 16)
    explanation = held.cache.explain("again")
    assert explanation.room_seconds > 0 and "waited" in str(explanation)
    held.cache.release(request)


def test_copies_that_fail_leave_the_match_without_its_load_or_with_it(held: Held) -> None:
    """What a failed copy held is room, too."""
    request, match = match_text(held)
    held.go(lambda _: True)
    assert held.num_loads == 2
    held.go()
    assert match.poll().num_cpu_tokens == 16
    held.cache.release(request)


def test_who_goes_on_before_there_is_room_has_no_hit(held: Held) -> None:
    """The next verb settles the match at what was there; it is told that it was late."""
    request, match = match_text(held)
    with pytest.raises(OutOfBlocksError):
        held.cache.rows.allocate(request, 20)
    assert num_waiting(held.cache) == 0
    match = match.poll()
    assert (match.ready, match.num_tokens) == (True, 0)
    causes = held.cache.explain("again").missed_tokens()
    assert causes[Cause.LATE] == 16 and "waited" in str(held.cache.explain("again"))
    held.cache.release(request)
    held.go()
    assert not held.num_loads, "nobody wants it any more"


def test_one_that_is_released_while_it_waits_holds_nothing(held: Held) -> None:
    """Its pins go with it, and no load is begun."""
    before = picture(held.cache)
    request, _ = match_text(held)
    held.cache.release(request)
    assert picture(held.cache) == before and num_waiting(held.cache) == 0


def test_matches_are_served_in_their_order(held: Held) -> None:
    """The second stands behind the first, and one load serves both."""
    (first, one), (second, two) = match_text(held, "first"), match_text(held, "second")
    assert num_waiting(held.cache) == 2
    held.go()
    assert held.num_loads == 2 and num_waiting(held.cache) == 0
    held.go()
    assert one.poll().num_cpu_tokens == two.poll().num_cpu_tokens == 16
    held.cache.release(first)
    held.cache.release(second)


def test_an_allocation_waits_for_units_and_blocks(held: Held) -> None:
    """Its refusal says that copies in flight hold what it lacks; one that waits has it when they have ended."""
    request, given = ask(held.cache, "new", [7] * 18), list[RowBlocks]()
    with pytest.raises(OutOfBlocksError, match="wait for the copies in flight") as refused:
        held.cache.rows.allocate(request, 5)
    assert refused.value.coming >= refused.value.missing > 0
    thread = threading.Thread(target=lambda: given.append(held.cache.rows.allocate(request, 5, wait_seconds=SECONDS)))
    thread.start()
    while not num_waiting(held.cache):
        threading.Event().wait(0.001)  # until it has come: nothing tells of that
    held.go()
    thread.join(SECONDS)
    (new,) = given
    assert [len(new.block_ids), *(len(table.block_ids) for table in new.tables)] == [5, 1, 5]
    held.cache.release(request)


def test_what_copies_do_not_hold_is_not_waited_for(held: Held) -> None:
    """A request that runs has it: the error says at once that no copy gives enough."""
    cache = held.cache
    held.go()
    runs = [computed(cache, f"runs {number}", [20 + number] * 18) for number in range(2)]
    request = ask(cache, "new", [7] * 18)
    with pytest.raises(OutOfBlocksError) as refused:
        cache.rows.allocate(request, 40, wait_seconds=SECONDS)
    assert refused.value.coming < refused.value.missing
    for each in (*runs, request):
        cache.release(each)


@pytest.mark.parametrize("what", ["a load", "a copy of a state"])
def test_what_nobody_waits_for_any_more_is_coming(what: str) -> None:
    """Its match was settled without it: its units are room as soon as it has ended, and the refusal says so."""
    fields = {"num_gpu_blocks": 40, "num_gpu_units": (5, 40), "state_copy": what != "a load"}
    with manager(**TIER, **fields) as cache:
        cache.release(computed(cache, "text", TEXT))
        for number in range(9 if what == "a load" else 0):
            cache.release(computed(cache, f"other {number}", [50 + number] * 18))
        held = Held(cache, (TaskKind.SWAP_IN, TaskKind.COPY))
        request, match = match_text_of(cache, "again")
        assert match.num_coming_tokens == 16
        cache.rows.allocate(request, 5)  # it does without
        live = [request]
        with pytest.raises(OutOfBlocksError, match="wait for the copies in flight") as refused:
            for number in range(9):
                live.append(ask(cache, f"runs {number}", [number] * 2))
                cache.rows.allocate(live[-1], 1)
        assert refused.value.row == "state" and refused.value.coming == (1 if what == "a load" else 2)  # and its source
        held.go()
        cache.rows.allocate(live[-1], 1)
        for each in live:
            cache.release(each)
        cache.check_invariants()


def match_text_of(cache: PrefixCacheManager, name: str) -> tuple[Request, Match]:
    request = Request(request_id=name, prompt_token_ids=TEXT)
    return request, cache.match(request)


def test_two_loads_of_one_turn_are_not_promised_the_same_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lane has three places, and two matches get room at once: the second is not begun by half."""
    other = [7] * 18
    with manager(**TIER, num_gpu_blocks=40, num_gpu_units=(7, 60)) as cache:
        for name, tokens in (("text", TEXT), ("other", other)):
            cache.release(computed(cache, name, tokens))
        for number in range(9):
            cache.release(computed(cache, f"first {number}", [50 + number] * 18))
        held = Held(cache, (TaskKind.SWAP_IN, TaskKind.SWAP_OUT))
        for number in range(4):
            cache.release(computed(cache, f"then {number}", [100 + number] * 18))
        running = ask(cache, "runs", [1] * 10)
        cache.rows.allocate(running, cache._books.residency.num_available(GPU) - 4)

        def has_room(kind: TaskKind, num_tasks: int = 1) -> bool:
            num_loads = len([task for task in held.tasks if task.kind is TaskKind.SWAP_IN])
            return kind is not TaskKind.SWAP_IN or num_loads + num_tasks <= 3

        monkeypatch.setattr(cache._movement.client, "has_room", has_room)
        requests = [Request(request_id=str(number), prompt_token_ids=each) for number, each in enumerate((TEXT, other))]
        for each in requests:
            assert cache.match(each).num_coming_tokens == 16
        cache.release(running)
        assert held.num_loads == 2, "one whole load"
        for each in requests:
            cache.release(each)
        held.go()
        held.go()
        cache.check_invariants()
