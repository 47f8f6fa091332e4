"""One check per order that keeps stale bytes from being read; each fails where that order is broken on purpose."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

import pytest

from fastdeploy_cache.books.arrivals import land
from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.path import Part
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.books.transfer import Segment, Transfer
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.cargo import Landings
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.requests.publisher import Publisher
from tests.rigs.cache_model import CacheModel

A, B, C, NEW = ([base + i for i in range(200)] for base in (1000, 2000, 3000, 4000))
Patch = pytest.MonkeyPatch


def _read(model: CacheModel, tokens: list[int]) -> None:
    """Match, wait and compare the content of what is there."""
    live = model.must_match(tokens)
    model.client.land_all()
    model.settle(live)
    model.release(live)


def _compute_in_all_available_blocks(model: CacheModel) -> None:
    """Another prompt writes every block that the cache is ready to give out."""
    gpu = model.cache.stats().gpu
    num_blocks = gpu.num_free + gpu.num_cached - gpu.num_protected
    live = model.must_match(NEW[: model.size * num_blocks])
    live.table = model.settle(live) + model.cache.allocate(live.request, num_blocks)
    model.compute(live, live.request.num_tokens)
    model.check_readable(live, live.table or [])


def stores_of_what_is_not_computed() -> CacheModel:
    """A store that starts while a request is half computed; what it copied is read afterwards."""
    model = CacheModel(1, 200, 200)
    live = model.must_match(A[:150])
    assert model.allocate(live, 150)
    model.compute(live, 64)
    model.client.land_all()
    model.compute(live, 150)
    model.release(live)
    model.client.land_all()
    model.kv_lost()
    _read(model, A[:151])
    return model


def break_commit(patch: Patch) -> None:
    """All blocks that a request holds are published with the first commit."""
    publish = Publisher._publish

    def too_much(self: Publisher, active: ActiveRequest, num_blocks: int) -> None:
        publish(self, active, max(num_blocks, min(len(active.block_ids), active.request.num_tokens)))

    patch.setattr(Publisher, "_publish", too_much)


def reads_of_a_load_in_flight() -> CacheModel:
    """A match whose blocks are still being loaded."""
    model = CacheModel(4, 12, 40)
    model.serve_and_copy(A[:40], B[:40])
    _read(model, A[:41])
    return model


def reads_of_a_store_in_flight() -> CacheModel:
    """The source of a store is wanted by others before the store has ended; then its copies are read."""
    model = CacheModel(4, 24, 60)
    model.serve(A[:40], stays=False, patient=False)
    model.serve(B[:96], stays=False, patient=False)
    _read(model, A[:41])
    return model


def break_landing(patch: Patch, verb: str) -> None:
    """What is moved joins the tree when it is asked for, not when it has come."""
    start = getattr(BlockMover, verb)

    def land_at_once(self: BlockMover, parts: Sequence[Part]) -> None:
        start(self, parts)
        transfer = self.in_flight[max(self.in_flight)]
        while transfer.segments:
            land(self._tree, transfer.segments.pop(0), True)

    patch.setattr(BlockMover, verb, land_at_once)


def writes_of_a_late_load() -> CacheModel:
    """A request gave up waiting; the load ends after another prompt has been computed."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40], B[:96])
    live = model.must_match(A[:41])
    assert live.match.num_coming_tokens
    model.settle(live)
    _compute_in_all_available_blocks(model)
    model.client.land()
    for other in model.live:
        model.check_readable(other, list(other.table or ())[: other.num_computed // 4])
    return model


def break_deadline(patch: Patch) -> None:
    """At a deadline the load's ids go home at once."""
    settle = Matcher.settle

    def send_home(self: Matcher, active: ActiveRequest) -> None:
        loads: list[Transfer] = list(active.loads)
        settle(self, active)
        for transfer in loads:
            while transfer.segments:
                segment: Segment = transfer.segments.pop()
                self._tree.unpin(segment)
                self._tree.pools[GPU].free(segment.ids, TASK)

    patch.setattr(Matcher, "settle", send_home)


def reads_ahead_of_a_superseded_load() -> CacheModel:
    """Another request computed what is being loaded; the one that runs ahead still reads the load's blocks."""
    model = CacheModel(4, 24, 60)
    model.serve_and_copy(A[:40], B[:48], C[:48])
    ahead = model.must_match(A[:41])
    assert model.run_ahead(ahead, 1)
    other = model.must_match(A[:41])
    assert model.allocate(other, 11 - len(model.settle(other)))
    model.compute(other, 41)
    model.client.land()
    model.release(other)
    _compute_in_all_available_blocks(model)
    model.check_readable(ahead, list(ahead.table or ())[:10])
    return model


def break_ahead(patch: Patch) -> None:
    """Ids that no run took go home when the load lands, whoever uses them."""

    def free(self: Landings, ids: array[int]) -> None:
        self._books.pools[self._transfer.tier].free(ids, TASK)

    patch.setattr(Landings, "_send_home", free)


def writes_behind_a_whole_hit() -> CacheModel:
    """A prompt that is cached whole writes its last token again, while another reads the cached blocks."""
    model = CacheModel(4, 12, 0, recompute_last_token=True)
    model.serve(A[:16], stays=False, patient=True)
    writer = model.must_match(A[:16])
    model.client.land_all()
    table = model.settle(writer)
    assert (len(table), writer.num_computed) == (4, 15)
    model.client.gpu[table[3]] = "being written"
    model.must_match(A[:17])
    return model


def break_copy(patch: Patch) -> None:
    """The writer gets the cached block itself."""
    settle_at = Matcher._settle_at

    def without_copy(self: Matcher, active: ActiveRequest, ids: array[int]) -> None:
        copy, num_before = active.copy, len(ids)
        settle_at(self, active, ids)
        if copy is not None and copy.has_landed:
            path = self._tree.find(active.request.namespace, active.keys, num_before + 1)[0]
            active.block_ids[-1] = [i for run in path for i in run.ids_in(GPU)][num_before]

    patch.setattr(Matcher, "_settle_at", without_copy)


def stores_from_a_lost_gpu() -> CacheModel:
    """A store ends well after the arrays that it was to read were lost and made anew."""
    model = CacheModel(4, 24, 60)
    model.serve(A[:40], stays=False, patient=False)
    model.kv_lost()
    model.client.land_all()
    _read(model, A[:41])
    return model


def break_epochs(patch: Patch) -> None:
    """A loss of the GPU is not noticed by the tree."""
    patch.setattr("fastdeploy_cache.ranks.drop_gpu", lambda tree: tree)


Check = Callable[[], CacheModel]
Break = Callable[[Patch], None]
CASES: list[tuple[Check, Break]] = [
    (stores_of_what_is_not_computed, break_commit),
    (reads_of_a_load_in_flight, lambda patch: break_landing(patch, "load")),
    (reads_of_a_store_in_flight, lambda patch: break_landing(patch, "store")),
    (writes_of_a_late_load, break_deadline),
    (reads_ahead_of_a_superseded_load, break_ahead),
    (writes_behind_a_whole_hit, break_copy),
    (stores_from_a_lost_gpu, break_epochs),
]


@pytest.mark.parametrize("check", [check for check, _ in CASES])
def test_the_order_is_kept(check: Check) -> None:
    """The content is right, the books add up, and nothing is left over."""
    model = check()
    model.check()
    for live in list(model.live):
        model.cache.release(live.request)
    model.live.clear()
    model.finish()


@pytest.mark.parametrize(("check", "break_it"), CASES)
def test_a_broken_order_is_seen(check: Check, break_it: Break, monkeypatch: Patch) -> None:
    """The same check reads wrong content where the product does not keep the order: it is worth something."""
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match="wrong KV served"):
        check()
