"""What interrupts, failures and callers' callbacks do to a turn: nothing is lost, and nobody hangs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.books.changes import RoomCame, Used
from fastdeploy_cache.books.run import CPU
from fastdeploy_cache.errors import ClosedError
from fastdeploy_cache.metrics.histogram import Histogram
from fastdeploy_cache.storage.tier import StorageTier
from tests.rigs.cache_model import CacheModel
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.storage_rig import STORE, A, Rig
from tests.rigs.write_policies import B, C, no_copies, write_back

TEXT = list(range(41))


def test_all_who_wait_for_one_load_are_called_in_order() -> None:
    """A thousand matches of one prompt wait for one load: each is called once, first come first, on one thread."""
    model = CacheModel(4, 24, 40)
    model.serve_and_copy(TEXT, list(range(100, 190)))
    called: list[int] = []
    requests = [Request(request_id=f"w{i}", prompt_token_ids=TEXT) for i in range(1000)]
    for i, request in enumerate(requests):
        match = model.cache.match(request)
        assert match.num_coming_tokens
        match.on_ready(lambda i=i: called.append(i))  # type: ignore[misc]
    assert not called
    model.client.land_all()
    assert called == list(range(1000))
    for request in requests:
        model.cache.release(request)
    model.finish()


def test_a_call_is_made_by_the_thread_whose_turn_decided_on_it() -> None:
    """Another thread's turn, between the end of the first and its calls, does not make them under its own locks."""
    model = CacheModel(4, 8, 0)
    books, made_by = model.cache._books, list[int]()

    class Slow:
        def __init__(self) -> None:
            self.queued = deque(["something"])

        def hand_over(self) -> None:
            self.queued.clear()
            other = threading.Thread(target=model.cache.stats)
            other.start()
            other.join(10)

    books.add_outlet(Slow())
    with books:
        books.call_later(lambda: made_by.append(threading.get_ident()))
    assert made_by == [threading.get_ident()]
    model.finish()


@pytest.mark.parametrize("has_store", [False, True])
def test_a_release_makes_room_for_copies_down_with_a_store_as_without(has_store: bool) -> None:
    """`write_back` looks at the cold end as often: what a release lets go counts, though storage holds it till then."""
    rig = Rig(write_policy="write_back", storage_write_policy="write_back")
    if not has_store:
        rig.model.cache.storage.detach()
    books = rig.model.cache._books
    live = rig.match(A)
    assert rig.model.allocate(live, 11)
    rig.model.compute(live, 41)
    rig.model.client.land_all()  # it is copied already
    num_moved, told = books.num_moved, list[int]()
    books.listen_to_moves(told.append)
    with no_copies(rig.model):
        rig.model.release(live)
    assert told == [num_moved + 10]
    rig.finish()


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_an_interrupt_at_the_end_of_a_turn_leaves_no_lock(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look at the cold end is interrupted, or lacks memory even to say so: the verb is interrupted or has happened,
    the lock is free, and its request can be released."""
    model = write_back()
    model.serve(A[:20], stays=False, patient=True)
    model.client.land_all()
    live = model.must_match(B[:20])

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(model.cache._movement.copy_down, "look_ahead", fail)
        patched.setattr(logging.Logger, "error", fail)
        with pytest.raises(error) if error is KeyboardInterrupt else contextlib.nullcontext():
            assert len(model.cache.allocate(live.request, 20)) == 20
    model.cache.release(live.request)
    model.live.remove(live)
    model.serve(C[:20], stays=False, patient=True)
    model.steps_may_fail = True
    model.finish()


def test_an_interrupted_eviction_gives_no_block_two_owners() -> None:
    """Ctrl-C while small prompts are evicted: those that have gone are free, and the one in between keeps its own."""
    model = CacheModel(4, 8, 0)
    for start in (0, 100, 200, 300):
        model.serve(list(range(start, start + 8)), stays=False, patient=True)
    taps, calls = model.cache._books.residency.taps, []

    def interrupt(*_: object) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    taps.ended += (interrupt,)
    live = model.must_match(list(range(500, 529)))
    with pytest.raises(KeyboardInterrupt):
        model.cache.allocate(live.request, 8)
    taps.ended = taps.ended[:-1]
    model.cache.release(live.request)
    model.live.remove(live)
    model.cache.check_invariants()  # and no taps, which have heard too much
    assert model.cache.stats().gpu.num_cached > 0
    model.cache.close()


def test_ages_that_lack_memory_lose_no_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are evicted just then are free, and the books add up."""
    model = CacheModel(4, 8, 0)
    model.serve(TEXT[:20], stays=False, patient=True)

    ages, counted = model.cache._books.residency.ages, Histogram.add

    def add(self: Histogram, value: float, weight: int = 1) -> None:
        if self in (*ages.residency, *ages.idle):
            raise MemoryError
        counted(self, value, weight)

    for start in (100, 200, 300):
        with monkeypatch.context() as patched:
            patched.setattr(Histogram, "add", add)
            live = model.must_match(list(range(start, start + 29)))
            assert model.allocate(live, 8)
        model.compute(live, 29)
        model.release(live)
        model.mirror.check()
    stats = model.cache.stats().gpu
    assert stats.num_free + stats.num_cached == 8
    model.cache.close()


def test_an_interrupt_while_rooms_settle_loses_no_pin() -> None:
    """A listener is interrupted: the others hear with the next turn, and every run is let go."""
    rig = Rig()
    books = rig.model.cache._books

    def interrupt(used: Used) -> None:
        raise KeyboardInterrupt

    books.listen(Used, interrupt)
    live = rig.match(A)
    assert rig.model.allocate(live, 11)
    rig.model.compute(live, 41)
    with pytest.raises(KeyboardInterrupt):
        rig.model.cache.release(live.request)
    rig.model.live.remove(live)
    books.ignore(Used, interrupt)
    rig.land_all()
    rig.model.check()
    rig.finish()


def test_no_memory_between_the_rooms_fails_no_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has happened has happened: the verb returns, its tasks go out, and the failure is counted."""
    rig = Rig()
    rig.model.steps_may_fail = True
    books = rig.model.cache._books
    note = books.note

    def fail(change: object) -> None:
        if isinstance(change, RoomCame):
            raise MemoryError
        note(change)  # type: ignore[arg-type]

    monkeypatch.setattr(books, "note", fail)
    waiter = object()
    with books:
        books.await_room(waiter, True, CPU)
    with books:
        books.await_room(waiter, False, CPU)
    assert books.mishaps.counts["settling"] == 1 and not books._lock.locked()
    monkeypatch.undo()
    rig.finish()


def test_an_attach_that_fails_half_way_can_be_done_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of it stays: nothing is copied down for it, the store can be attached, and the cache closed."""
    rig = Rig(write_policy="write_back")
    cache = rig.model.cache
    cache.storage.detach()
    attach = StorageTier.attach

    def fail(self: StorageTier) -> None:
        attach(self)
        raise MemoryError

    monkeypatch.setattr(StorageTier, "attach", fail)
    with pytest.raises(MemoryError):
        cache.storage.attach(STORE, client=SimulatedStorage(rig.model.client))
    assert not cache.storage.is_attached and not cache._movement.copy_down._through
    monkeypatch.undo()
    cache.storage.attach(STORE, client=rig.store)
    rig.finish()


@pytest.mark.parametrize("leaves_owner", [True, False])
def test_a_close_after_an_interrupted_turn_ends_everything(leaves_owner: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C between the lock and the note of its owner, or before the lock goes back: `close` forces its way."""
    monkeypatch.setattr("fastdeploy_cache.books.books._STUCK_SECONDS", 0.05)
    model = CacheModel(4, 8, 0)
    books = model.cache._books
    books._lock.acquire()
    books._thread = threading.get_ident() if leaves_owner else None
    model.cache.close()
    with pytest.raises(ClosedError):
        model.cache.match(Request(request_id="late", prompt_token_ids=TEXT[:5]))


@pytest.mark.parametrize("error", [asyncio.CancelledError, SystemExit, GeneratorExit, KeyboardInterrupt])
def test_a_callback_cannot_end_the_thread_that_calls_it(error: type[BaseException]) -> None:
    """Also with what is no `Exception`: the answer of the ranks is taken, and the next one is, too."""
    model = CacheModel(4, 24, 40)
    model.serve_and_copy(TEXT, list(range(100, 190)))
    live = model.must_match(TEXT)

    def fail() -> None:
        raise error

    def land_all() -> None:
        model.client.land_all()
        ended.append("as ever")

    ended: list[str] = []
    live.match.on_ready(fail)
    ranks = threading.Thread(target=land_all)
    ranks.start()
    ranks.join(10)
    assert ended == ["as ever"] and len(model.settle(live)) == 10
    model.release(live)
    model.finish()


def test_an_insert_of_an_older_generation_behind_what_has_gone_caches_nothing() -> None:
    """A reset came in between: all stays the caller's, as for an insert from the first block on."""
    model = CacheModel(4, 12, 0)
    blocks, request = model.cache.blocks, Request(request_id="names", prompt_token_ids=TEXT[:16])
    ids = blocks.allocate(4)
    blocks.insert(request, ids[:2])
    model.cache.reset()
    done = blocks.insert(request, ids[2:], first_block=2, pin=True)
    assert (done.num_blocks, done.duplicate_ids) == (0, ids[2:])
    assert done.pinned is not None and not done.pinned.block_ids
    blocks.free(ids[2:])
    model.cache.close()


def test_a_closed_cache_serves_no_metrics() -> None:
    """No thread and no port that nobody would end."""
    cache = PrefixCacheManager(CacheConfig(block_size=4, num_gpu_blocks=4, num_cpu_blocks=0, transfer_client="inline"))
    cache.close()
    with pytest.raises(ClosedError):
        cache.serve_metrics()
