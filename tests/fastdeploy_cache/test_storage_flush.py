"""What a flush says: that a store has everything that is cached now, by what it answers when it is asked."""

from __future__ import annotations

import logging
import threading

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.storage_rig import A, Rig

SECONDS = 10.0
B = [*A[:20], *range(500, 521)]  # half of it is A's


def filled(*prompts: list[int]) -> Rig:
    """A cache of these, written to a store that answers at once from here on."""
    rig = Rig(num_gpu=48, num_cpu=48)
    for tokens in prompts:
        rig.model.serve_and_copy(tokens)
        rig.land_all()
    rig.store.answers_at_once = True
    return rig


def lookups(store: SimulatedStorage) -> list[int]:
    """How many blocks each look-up from here on is about."""
    asked: list[int] = []
    submit = store.submit

    def note(task: object) -> None:
        if task.kind is TaskKind.LOOKUP:  # type: ignore[attr-defined]
            asked.append(len(task.hashes) // 32)  # type: ignore[attr-defined]
        submit(task)  # type: ignore[arg-type]

    store.submit = note  # type: ignore[method-assign]
    return asked


def test_every_block_is_asked_for_once() -> None:
    """A prompt at a time; of two that begin alike the beginning once."""
    rig = filled(A, B)
    asked = lookups(rig.store)
    assert rig.model.cache.storage.flush(SECONDS)
    assert sum(asked) == len(rig.store.objects) == 15 and len(asked) == 2
    rig.finish()


@pytest.mark.parametrize("num_dropped", [1, 7, 15])
def test_what_the_store_has_dropped(num_dropped: int) -> None:
    """Everything was written, and some of it is gone: no; the next flush writes that again, and says yes."""
    rig = filled(A, B)
    rig.store.drop(num_dropped)
    cache = rig.model.cache
    assert not cache.storage.flush(SECONDS)
    assert len(rig.store.objects) == 15 - num_dropped
    assert cache.storage.flush(SECONDS)
    assert len(rig.store.objects) == 15
    rig.finish()


def test_a_store_that_is_too_small() -> None:
    """It drops the first blocks for the last ones: no, however often it is asked."""
    rig = Rig(num_gpu=48, num_cpu=48)
    rig.store.capacity, rig.store.answers_at_once = 6, True
    for tokens in (A, B):
        rig.model.serve_and_copy(tokens)
        rig.land_all()
    for _ in range(3):
        assert not rig.model.cache.storage.flush(SECONDS)
        assert len(rig.store.objects) == 6
    rig.finish()


def test_a_store_that_cannot_be_asked() -> None:
    """One that fails to answer, or not in time, or goes away meanwhile: no; and nobody waits longer."""
    rig = filled(A)
    cache = rig.model.cache
    rig.store.answers_at_once = False
    assert not cache.storage.flush(0.0)
    rig.store.land("failed")
    rig.land_all()
    waiting, found = threading.Event(), list[bool]()
    submit = rig.store.submit

    def note(task: object) -> None:
        submit(task)  # type: ignore[arg-type]
        waiting.set()

    for end in (lambda: rig.store.land("failed"), lambda: cache.storage._tier.be_quiet(True), cache.storage.detach):  # type: ignore[union-attr]
        waiting.clear()
        rig.store.submit = note  # type: ignore[method-assign]
        flush = threading.Thread(target=lambda: found.append(cache.storage.flush(SECONDS)))
        flush.start()
        assert waiting.wait(SECONDS)
        end()
        flush.join(SECONDS)
        assert not flush.is_alive() and found.pop() is False
        if cache.storage.is_attached:
            with cache._books:
                cache.storage._tier.be_quiet(False)
        rig.store.submit = submit  # type: ignore[method-assign]
        rig.land_all()
    rig.finish()


def test_what_is_computed_meanwhile_was_not_asked_for() -> None:
    """A block that joins the cache while the store is being asked is not said to be there."""
    rig = filled(A)
    submit, tokens = rig.store.submit, list(range(900, 909))

    def serve_first(task: object) -> None:
        rig.store.submit = submit  # type: ignore[method-assign]
        rig.model.serve_and_copy(tokens)
        submit(task)  # type: ignore[arg-type]

    rig.store.submit = serve_first  # type: ignore[method-assign]
    assert not rig.model.cache.storage.flush(SECONDS)
    rig.land_all()
    assert rig.model.cache.storage.flush(SECONDS)
    rig.finish()


def test_a_run_that_was_cut_while_it_was_written() -> None:
    """Nobody could note that storage has it: the next flush offers its parts again, and says yes."""
    rig = Rig(num_gpu=48, num_cpu=48)
    rig.model.serve_and_copy(A)
    cache = rig.model.cache
    tree = cache._books.tree
    with cache._books:
        (run,) = tree.runs()
        assert any(write.run is run for write in cache.storage._tier.writes._writes.values()), "it is being written"
        tree.split(run, 3)
    rig.land_all()
    assert [run.stored.num_blocks for run in tree.runs()] != [run.num_blocks for run in tree.runs()]
    rig.store.answers_at_once = True
    assert cache.storage.flush(SECONDS)
    assert all(run.stored.num_blocks == run.num_blocks for run in tree.runs())
    rig.finish()


def test_without_a_store_it_says_no_and_why_once(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing is raised: a planned end goes on."""
    config = CacheConfig(num_gpu_blocks=8, transfer_client="inline")
    with PrefixCacheManager(config) as cache, caplog.at_level(logging.WARNING):
        assert not cache.storage.flush(SECONDS) and not cache.storage.flush(SECONDS)
    assert len([line for line in caplog.messages if "event=flush_without_storage" in line]) == 1
