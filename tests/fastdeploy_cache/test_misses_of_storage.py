"""Why a request missed what a store has, or does not have."""

from __future__ import annotations

from fastdeploy_cache.books.causes import Cause
from tests.rigs.sick_caches import prompt
from tests.rigs.sick_stores import StoreAsker

TAIL = {Cause.PARTIAL: 1, Cause.LAST: 1}  # of a prompt with two tokens behind its full blocks


def test_what_storage_has_and_does_not_bring_in_time_is_late() -> None:
    """Also where its read was given up, and has ended so, before the request gets its blocks."""
    asker = StoreAsker(objects=StoreAsker().rounds().store.objects)
    request = asker.prefetched(prompt(0), num_tasks=1)
    match = asker.cache.match(request).wait(0)
    asker.land()
    assert asker.admit(request, match) == {Cause.LATE: 40, **TAIL}
    assert "storage has it" in str(asker.cache.explain(request.request_id))


def test_what_storage_has_and_the_cpu_tier_has_no_room_for_is_told_so() -> None:
    """Eight of ten blocks fit, and the engine does not wait for the load that would make room; the doctor names the
    tier."""
    asker = StoreAsker(objects=StoreAsker().rounds().store.objects, num_cpu=8)
    for number in range(24):
        request = asker.prefetched(prompt(number % 8), num_tasks=0)
        asker.store.land_all()
        match = asker.cache.match(request).wait(0)
        asker.land()
        missed = asker.admit(request, match)
        assert missed == {Cause.LATE: 32, Cause.ROOM: 8, **TAIL}, number
        asker.cache.release(request)
        asker.cache.reset()
    late, room = asker.cache.examine()
    assert (late.name, room.name) == ("loads_late", "no_room_to_fetch") and "num_cpu_blocks" in room.advice


def test_what_storage_does_not_have_after_all_is_not_late() -> None:
    """A look-up that was wrong: it was never cached here."""
    asker = StoreAsker()
    asker.store.lies = True
    request = asker.prefetched(prompt(0), num_tasks=1)
    asker.store.lies = False
    match = asker.cache.match(request)
    asker.land()
    assert asker.admit(request, match) == {Cause.NEW: 40, **TAIL}
