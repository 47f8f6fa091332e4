"""Turns: one owner of the lock, of settling and of handing over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.books import MAX_ROUNDS, Books
from fastdeploy_cache.books.changes import Change, Copied
from fastdeploy_cache.books.evicting import evict
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.storage_rig import A, Rig, stored

B = list(range(500, 525))  # six full blocks of four and one token
SECONDS = 10.0


@dataclass(slots=True, eq=False, kw_only=True)
class Rang(Change):
    """A change of this test's."""

    name: str = ""


class Box:
    """An outlet that notes what it hands over, and whether the lock was free then."""

    def __init__(self, books: Books) -> None:
        self._books = books
        self.queued: deque[str] = deque()
        self.handed_over: list[tuple[str, bool]] = []

    def hand_over(self) -> None:
        while self.queued:
            self.handed_over.append((self.queued.popleft(), not self._books._lock.locked()))


@pytest.fixture
def books() -> Books:
    """Empty ones."""
    return Books(
        PrefixTree(4, (BlockPool("GPU", 8), BlockPool("CPU", 8)), LeastRecentlyUsed(lambda: 0.0), 0, SYSTEM_CLOCK)
    )


def test_a_prefetch_that_waits_for_room_goes_on_in_the_turn_that_makes_it() -> None:
    """A match that follows a prefetch waits for CPU blocks, which a release sets free; then somebody else has a settled
    hit. After each of the two no task lies in any outbox, and the store has been asked for the next piece."""
    rig = Rig(stored(A), num_cpu=8)
    rig.know(A)
    tier = rig.model.cache.storage._tier
    assert isinstance(tier, StorageTier)
    rig.model.serve_and_copy(B)
    rig.land_all()
    holder = rig.match(B)  # holds six of the eight CPU blocks
    rig.prefetch(A)
    rig.store.land()  # the look-up
    live = rig.match(A)
    rig.store.land()  # a piece of two blocks, whose load to the GPU is under way now
    assert [task.kind for task in rig.model.client.tasks] == [TaskKind.SWAP_IN]
    assert not rig.store.tasks and tier.reads._waiting, "there is no room for the next piece"

    rig.model.release(holder)
    assert {task.kind for task in rig.store.tasks} == {TaskKind.PREFETCH}
    hit = rig.match(B[:5])
    assert hit.match.ready and hit.match.num_gpu_tokens == 4
    assert not any(outlet.queued for outlet in rig.model.cache._books._outlets)
    assert rig.store.tasks
    rig.land_all()
    rig.model.release(hit)
    rig.model.settle(live)
    rig.model.release(live)
    rig.finish()


def test_turns_never_nest(books: Books) -> None:
    """A second turn of the same thread raises, and the first goes on; another thread waits for it."""
    order: list[str] = []

    def other() -> None:
        with books:
            order.append("other")

    thread = threading.Thread(target=other)
    with books:
        with pytest.raises(RuntimeError, match="inside another one of the same thread"), books:
            pass
        thread.start()
        thread.join(0.05)
        order.append("first")
    thread.join(SECONDS)
    assert order == ["first", "other"]


def test_a_turn_hands_over_without_the_lock_even_if_it_raises(books: Books) -> None:
    """Tasks and calls that were decided on before the failure go out, after the lock has been given back."""
    box, calls = Box(books), list[bool]()
    books.add_outlet(box)

    def fail() -> None:
        with books:
            box.queued.append("task")
            books.call_later(lambda: calls.append(books._lock.locked()))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert box.handed_over == [("task", True)] and calls == [False]


def test_changes_are_heard_in_order_until_nothing_changes(books: Books) -> None:
    """Listeners hear of each change under the lock, in the order in which they listen; what they note is heard too."""
    heard: list[tuple[str, str]] = []

    def first(rang: Rang) -> None:
        assert books._lock.locked()
        heard.append(("first", rang.name))
        if len(rang.name) < 3:
            books.note(Rang(name=rang.name + "!"))

    books.listen(Rang, first)
    books.listen(Rang, lambda rang: heard.append(("second", rang.name)))
    with books:
        books.note(Rang(name="a"))
        assert not heard
    assert heard == [(who, name) for name in ("a", "a!", "a!!") for who in ("first", "second")]


def test_what_a_room_raises_costs_its_own_work(books: Books) -> None:
    """The verb ends well, other rooms hear of the change, and the failure is counted."""
    heard: list[str] = []

    def fail(rang: Rang) -> None:
        raise ValueError

    books.listen(Rang, fail)
    books.listen(Rang, lambda rang: heard.append(rang.name))
    with books:
        books.note(Rang(name="a"))
    assert heard == ["a"] and books.mishaps.counts["settling"] == 1


@pytest.mark.parametrize(("num_echoes", "counts"), [(MAX_ROUNDS - 1, 0), (MAX_ROUNDS + 3, 1)])
def test_settling_is_bounded(books: Books, num_echoes: int, counts: int) -> None:
    """Rooms that change each other for too long are counted, others get the lock, and further turns go on."""
    left, holders = num_echoes, set[bool]()

    def echo(rang: Rang) -> None:
        nonlocal left
        holders.add(books._lock.locked())
        if left:
            left -= 1
            books.note(Rang())

    books.listen(Rang, echo)
    with books:
        books.note(Rang())
    assert (left, books.mishaps.counts["settling"], holders) == (0, counts, {True})
    assert not books._changes and not books._lock.locked()


def test_an_endless_echo_ends_the_turn_all_the_same(books: Books) -> None:
    """What never comes to rest takes no verb with it, and is there for the next turn."""
    num_heard = 0

    def echo(rang: Rang) -> None:
        nonlocal num_heard
        num_heard += 1
        books.note(Rang())

    books.listen(Rang, echo)
    with books:
        books.note(Rang())
    assert books._changes and not books._lock.locked() and num_heard == MAX_ROUNDS * (MAX_ROUNDS + 1)


def test_a_change_keeps_its_run_until_all_have_heard_it() -> None:
    """A listener that evicts all it can does not take away the run that the change is about."""
    rig = Rig()
    books, seen = rig.model.cache._books, list[int]()

    def evict_all(copied: Copied) -> None:
        assert copied.pin is not None
        residency = books.residency
        evict(residency, CPU, residency.num_available(CPU) - books.pools[CPU].num_free)
        seen.append(len(copied.pin.run.ids_in(CPU)))

    books.listen(Copied, evict_all)
    rig.model.serve_and_copy(A)
    rig.land_all()
    assert seen and all(seen)
    books.ignore(Copied, evict_all)
    rig.finish()


def test_nobody_pays_for_changes_that_nobody_hears(books: Books) -> None:
    """Without a listener a change is not kept; after the last has gone, neither."""
    hear: Callable[[Rang], None] = lambda rang: None  # noqa: E731
    assert Rang not in books.listeners
    books.listen(Rang, hear)
    assert Rang in books.listeners
    books.ignore(Rang, hear)
    with books:
        books.note(Rang())
        assert not books._changes and Rang not in books.listeners


def test_a_call_is_made_once_whoever_leaves_a_turn_meanwhile(books: Books) -> None:
    """A turn without calls hands over; before it comes back, another turn decides on a call and makes it: once."""
    made: list[str] = []

    class Between(Box):
        def hand_over(self) -> None:
            super().hand_over()
            with books:
                books.call_later(lambda: made.append("call"))

    box = Between(books)
    books.add_outlet(box)
    with books:
        box.queued.append("task")
    assert box.handed_over == [("task", True)]
    assert made == ["call"]
