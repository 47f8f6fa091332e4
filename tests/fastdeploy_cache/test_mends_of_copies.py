"""What was mended of blocks on their way: from storage, for callers and from other instances, where memory runs out, or
where the cache forgets everything or loses its arrays meanwhile."""

from __future__ import annotations

import dataclasses

import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.changes import Copied
from fastdeploy_cache.callers import copies
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.requests import matcher
from fastdeploy_cache.storage.tier import StorageTier
from tests.rigs.cache_model import CacheModel
from tests.rigs.scarce_memory import TightIds, no_memory, take_tight_ids
from tests.rigs.sick_caches import prompt
from tests.rigs.sick_stores import StoreAsker
from tests.rigs.simulated_pair import TEXT as OFFERED
from tests.rigs.simulated_pair import SimulatedPair
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.storage_rig import STORE, A, Rig, stored


def reading_rig() -> tuple[Rig, StorageTier]:
    """A store that has A and has said so: two pieces of it are being read."""
    rig = Rig(stored(A))
    rig.know(A)
    rig.prefetch(A)
    rig.store.land()
    tier = rig.model.cache.storage._tier
    assert isinstance(tier, StorageTier) and len(rig.store.tasks) == 2
    rig.model.steps_may_fail = True
    return rig, tier


def test_a_piece_that_comes_in_part_gives_the_rest_back_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of it is whole and joins the tree; the others go home, though nobody could list them."""
    rig, tier = reading_rig()
    piece = next(iter(tier.reads._pieces.values()))
    assert len(piece.ids) > 2
    piece.ids = TightIds(piece.ids, num_left=1)  # type: ignore[assignment]
    take_tight_ids(rig.model.cache._books.pools[1], monkeypatch)
    rig.store.max_read = 1
    rig.store.land()
    rig.model.check()
    rig.land_all()
    assert rig.model.cache.stats().cpu.num_cached == 1
    rig.finish()


def test_the_blocks_of_a_piece_go_home_whatever_else_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answer cannot be counted: its blocks were noted nowhere but with the piece, and they join the tree."""
    rig, tier = reading_rig()
    num_blocks = len(next(iter(tier.reads._pieces.values())).ids)
    with monkeypatch.context() as patched:
        patched.setattr(tier.link, "judge", no_memory)
        rig.store.land()
    rig.model.check()
    assert rig.model.cache.stats().cpu.num_cached == num_blocks
    rig.finish()


@pytest.mark.parametrize("num_landed", [0, 1])
def test_an_answer_that_cannot_be_judged_ends_its_prefetch(num_landed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one to the look-up, or to a piece: a match that follows waits for as long as its prefetch has not ended."""
    rig = Rig(stored(A))
    rig.know(A)
    rig.prefetch(A)
    rig.model.steps_may_fail = True
    tier = rig.model.cache.storage._tier
    assert isinstance(tier, StorageTier)
    for _ in range(num_landed):
        rig.store.land()
    with monkeypatch.context() as patched:
        patched.setattr(tier.link, "judge", no_memory)
        rig.store.land_all()
    live = rig.match(A)
    rig.land_all()
    assert live.match.poll().ready
    rig.finish()


def swapping_out() -> tuple[CacheModel, CallerTransfer, list[int], Request]:
    """A caller's blocks that are being copied to the CPU tier."""
    model, request = CacheModel(4, 8, 8), Request(request_id="names", prompt_token_ids=A[:16])
    ids = model.cache.blocks.allocate(4)
    transfer = model.cache.blocks.copies.swap_out(request, ids)
    assert transfer.num_blocks == 4
    return model, transfer, ids, request


def check_swapped_out(model: CacheModel, transfer: CallerTransfer, ids: list[int], request: Request) -> None:
    """The copies are cached, and the blocks are read no more: given back, they are free at once."""
    assert transfer.succeeded and model.cache.blocks.lookup(request).num_cpu_blocks == 4
    model.check()
    model.cache.blocks.free(ids)
    assert model.cache.stats().gpu.num_free == 8


def test_a_callers_copies_go_home_without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have come and joined the tree, and nobody could list those that have not: the copy has succeeded, and the
    caller's blocks are read no more."""
    model, transfer, ids, request = swapping_out()
    with monkeypatch.context() as patched:
        patched.setattr(copies, "array", no_memory)
        model.client.land_all()
    check_swapped_out(model, transfer, ids, request)
    model.finish()


def test_copies_that_cannot_be_told_of_have_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no memory to say that they may go on to storage: they are cached, and the caller's blocks are read no
    more."""
    model, transfer, ids, request = swapping_out()
    books = model.cache._books
    note = books.note

    def fail_to_note(change: object) -> None:
        if isinstance(change, Copied):
            raise MemoryError
        note(change)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(books, "note", fail_to_note)
        model.client.land_all()
    check_swapped_out(model, transfer, ids, request)
    assert model.cache.stats().num_failed_steps["landing"] == 1
    model.steps_may_fail = True
    model.finish()


def test_what_was_copied_before_a_reset_is_not_found() -> None:
    """A caller's blocks are on their way to the CPU tier when everything is forgotten: they come, and join nothing."""
    model, transfer, ids, request = swapping_out()
    model.reset()
    model.client.land_all()
    assert transfer.done and not model.cache.blocks.lookup(request).num_blocks
    assert model.cache.stats().cpu.num_free == 8
    model.cache.blocks.free(ids)
    model.finish()


def test_what_was_received_before_a_reset_is_not_found() -> None:
    """All ranks have read it, and everything is forgotten before they say so: it joins nothing, and its receiver hears
    why."""
    pair = SimulatedPair()
    a, b = pair.a, pair.b
    assert b.peers is not None
    live = a.must_match(OFFERED)
    assert a.allocate(live, 11)
    a.compute(live, len(OFFERED))
    request = Request(request_id="b", prompt_token_ids=OFFERED)
    receive = b.cache.peers.receive(request, a.cache.peers.offer(live.request).offer)
    (reading,) = b.peers.receives
    b.peers.read(reading, 100)
    b.cache.reset()
    assert b.peers.confirm(reading)
    assert not b.cache.blocks.lookup(request).num_blocks and b.cache.stats().gpu.num_free == 30
    assert receive.done and receive.reason == "cancelled"
    b.check()


def test_a_store_that_still_has_something_on_its_way_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was detached, and its thread got no processor to answer in time: what it reads into stays its own, until the
    answers come. Then it goes with the next one that is detached."""
    rig, _ = reading_rig()
    storage = rig.model.cache.storage
    monkeypatch.setattr(rig.store, "stop", lambda: None)
    storage.detach()
    rig.model.check()
    assert len(storage._beside) == 1 and rig.model.cache.stats().cpu.num_in_flight == 10
    rig.store.land_all()
    rig.model.check()
    assert rig.model.cache.stats().cpu.num_in_flight == 0
    storage.attach(dataclasses.replace(STORE), client=SimulatedStorage(rig.model.client))
    storage.detach()
    assert not storage._beside
    rig.model.finish()


def test_what_has_come_and_could_not_be_noted_is_a_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A match has begun to load what storage has brought, and there is no memory to note that it was found: what the
    request hit and what it missed are still all that it asked for."""
    asker = StoreAsker(objects=StoreAsker().rounds().store.objects)
    request = asker.prefetched(prompt(0), num_tasks=1)
    match = asker.cache.match(request)
    with monkeypatch.context() as patched:
        patched.setattr(matcher, "wait_for", no_memory)
        asker.land()
    missed = asker.admit(request, match)
    assert sum(missed.values()) + match.poll().num_tokens == request.num_tokens


def test_what_the_model_computes_until_it_is_told_of_new_arrays_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank has new arrays: what was on the old ones is forgotten before the model is told, nothing is moved while it
    computes on, and what it has computed until then is forgotten, too."""
    model, seen = CacheModel(4, 12, 12), list[tuple[int, int]]()
    cache = model.cache

    def tell(_: int) -> None:
        num_found = len(cache.blocks.lookup(Request(request_id="names", prompt_token_ids=A[:8])).block_ids)
        late = Request(request_id="late", prompt_token_ids=A[8:16])
        cache.match(late)
        cache.allocate(late, 2)
        cache.commit(late, 8)
        cache.release(late)
        seen.append((num_found, len(model.client.tasks)))

    monkeypatch.setattr(cache.ranks, "_tell_kv_lost", tell)
    model.serve_and_copy(A[:8])
    cache.ranks.on_kv_lost(0)
    assert seen == [(0, 0)]
    assert (cache.stats().gpu.num_cached, cache.stats().cpu.num_cached) == (0, 2)
    model.finish()
