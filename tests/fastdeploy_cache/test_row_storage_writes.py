"""Checkpoints on their way to storage: behind their full KV, and never without an end."""

from __future__ import annotations

import dataclasses

import pytest

from fastdeploy_cache.books.block_pool import CHECKPOINT
from fastdeploy_cache.books.run import CPU, Pin
from fastdeploy_cache.storage.absent import NoTier
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import is_page
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.held_store import HeldStore, stored_in
from tests.rigs.hybrid_requests import FULL, TEXT, computed
from tests.rigs.stored_rows import LONG, ask, names_of, new_cache, no_memory, pages_of, written_objects


@pytest.fixture
def objects() -> dict[str, bytes]:
    """What a cache has written that served TEXT and LONG."""
    return written_objects()


def test_an_image_is_written_behind_its_full_kv() -> None:
    """Of each checkpoint no page is offered before storage has all blocks in front of it."""
    objects: dict[str, bytes] = {}
    cache = new_cache()
    with stored_in(cache, objects) as store:
        store.holds = {TaskKind.WRITE}
        cache.release(computed(cache, "text"))
        assert [len(task.hashes) // 32 for task in store.tasks] == [4]
        store.step("the disk is full")
        assert not store.tasks, "and none where they were not taken"
        request, _ = ask(cache, TEXT)
        cache.rows.allocate(request, 1)
        cache.commit(request, 18)
        cache.release(request)
        store.step()
        (image,) = store.tasks
        assert all(map(is_page, names_of(image)))
        store.go()
        assert len(pages_of(objects)) == len(image.source_ids)
        assert cache.storage.flush(5.0)


def test_what_the_store_has_dropped_is_written_again(objects: dict[str, bytes]) -> None:
    """A flush asks for every page, too."""
    cache = new_cache()
    with stored_in(cache, objects):
        cache.release(computed(cache, "text"))
        assert cache.storage.flush(5.0)
        page = pages_of(objects)[0]
        del objects[page]
        assert not cache.storage.flush(5.0), "one is missing"
        assert page not in objects
        assert cache.storage.flush(5.0)
        assert page in objects


def test_a_store_that_goes_by_tokens_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """It has no names for checkpoints: one line says so, and nothing is read or written."""
    cache = new_cache()
    with cache:
        store = HeldStore(cache, {})
        store.needs_token_ids = True
        cache.storage.attach(StorageConfig(folder="/nowhere", weights_id="w"), client=store)
        assert "event=storage_unfit" in caplog.text
        cache.release(computed(cache, "text"))
        request, match = ask(cache, LONG)
        assert match.num_tokens == 16 and match.ready
        cache.release(request)
        assert {task.kind for task in store.log} <= {TaskKind.PROBE}


def test_pages_that_are_being_written_are_no_room() -> None:
    """They may leave their checkpoint meanwhile, but are free only when they have been read: more than there is would
    be promised, and nothing could go for it."""
    cache = new_cache(num_cpu_blocks=8)
    with stored_in(cache, {}) as store:
        store.holds = {TaskKind.WRITE}
        cache.release(computed(cache, "text"))
        store.step()
        (image,) = store.tasks
        pool, residency = cache._books.pools[CPU], cache._books.residency
        assert residency.num_available(CPU) == pool.num_blocks - len(image.source_ids)
        run = next(iter(cache._books.tree.runs()))
        with cache._books:
            cache._books.tree.pin(pin := Pin(run, run.num_blocks))  # of the full KV alone
            num_unread = pool.count(CHECKPOINT) - len(image.source_ids)
            assert residency.num_available(CPU) == pool.num_free + num_unread
            cache._books.tree.unpin(pin)
        cache.check_invariants()
        store.go()
        assert residency.num_available(CPU) == pool.num_blocks


def test_images_do_not_wait_for_all_blocks() -> None:
    """Under steady writing a ready image is written before further blocks: else the store fills with what nobody can
    use."""
    cache = new_cache(num_gpu_blocks=40, num_gpu_units=(20, 40))
    with stored_in(cache, {}) as store:
        store.holds = {TaskKind.WRITE}
        cache.storage._tier.writes._limits = dataclasses.replace(  # type: ignore[union-attr]
            cache.storage._tier.writes._limits,
            max_writing_blocks=8,
            chunk_blocks=4,  # type: ignore[union-attr]
        )
        for number in range(30):
            cache.release(computed(cache, str(number), [number] * 18))
            if store.tasks:
                store.step()
        written = [names_of(task) for task in store.log if task.kind is TaskKind.WRITE]
        num_images = sum(is_page(names[0]) for names in written)
        num_blocks = sum(len(names) for names in written if not is_page(names[0]))
        assert num_images >= num_blocks // 16 > 1, "it was none"
        store.go()


def test_at_a_boundary_of_chunks_there_is_nothing_to_write() -> None:
    """A checkpoint of full KV alone: a flush has all without it, and the next life goes on there."""
    chunk = KVGroup(kind="chunk", reach_tokens=8, layers=(1,))
    layout = KVLayout(num_layers=2, num_kv_heads=1, head_dim=4, groups=(FULL, chunk))
    objects: dict[str, bytes] = {}
    for life in range(2):
        with stored_in(new_cache(layout), objects) as store:
            cache = store.cache
            request, match = ask(cache, TEXT)
            assert match.poll().num_tokens == 16 * life
            if life == 0:
                cache.rows.allocate(request, 5)
                cache.commit(request, 18)
            cache.release(request)
            assert cache.storage.flush(5.0)
    assert not pages_of(objects)


def test_a_store_that_takes_nothing_is_owed_no_more_than_the_tier_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """What has left the CPU tier unwritten is not kept in mind."""
    cache = new_cache()
    with stored_in(cache, {}) as store:
        monkeypatch.setattr(store, "has_room", lambda *_: False)
        for number in range(120):
            cache.release(computed(cache, str(number), [number] * 18))
        tier = cache.storage._tier
        assert not isinstance(tier, NoTier) and tier.writes.checkpoints is not None
        assert len(tier.writes.checkpoints._queue) <= 40


def test_a_flush_ends_though_a_write_gets_no_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who waits for the queue hears of its end."""
    cache = new_cache()
    with stored_in(cache, {}, may_fail=True) as store:
        store.holds = {TaskKind.WRITE}
        cache.release(computed(cache, "text"))
        with monkeypatch.context() as patched:
            patched.setattr("fastdeploy_cache.storage.checkpoint_writes.page_names", no_memory)
            store.step()
        tier = cache.storage._tier
        assert not isinstance(tier, NoTier) and tier.writes.is_idle and tier.writes.wait_drained(0.0)
        store.go()
        cache.check_invariants()
        caplog.clear()  # the traceback has the cache's memory


def test_what_has_come_from_storage_is_not_written_again(objects: dict[str, bytes]) -> None:
    """Neither blocks nor pages."""
    cache = new_cache()
    with stored_in(cache, objects) as store:
        request, match = ask(cache, TEXT)
        cache.rows.allocate(request, 5 - len(match.poll().block_ids))
        cache.commit(request, 18)
        cache.release(request)
        assert not [task for task in store.log if task.kind is TaskKind.WRITE]


@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("num_cpu_blocks", [5, 8, 9, 10])
def test_a_flush_goes_through_a_small_tier(policy: str, num_cpu_blocks: int) -> None:
    """Copies that storage has make room for the image behind them."""
    objects: dict[str, bytes] = {}
    cache = new_cache(num_cpu_blocks=num_cpu_blocks, cpu_write_policy=policy, max_load_share=0.5)
    with stored_in(cache, objects):
        cache.release(computed(cache, "long", LONG))
        assert cache.storage.flush(5.0)
    assert pages_of(objects)


def test_a_checkpoint_whose_gpu_is_lost_while_it_is_written() -> None:
    """Its heir is offered anew: the write has marked what is gone."""
    objects: dict[str, bytes] = {}
    cache = new_cache()
    with stored_in(cache, objects) as store:
        store.holds = {TaskKind.WRITE}
        cache.release(computed(cache, "text"))
        store.step()
        assert store.tasks, "its image"
        cache.ranks.kv_lost(0)
        store.go()
        assert cache.storage.flush(5.0)


def test_an_image_whose_blocks_get_no_memory_waits_for_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are left out, and nothing that is written would start its own write later."""
    cache = new_cache()
    with stored_in(cache, {}, may_fail=True):
        tier = cache.storage._tier
        assert not isinstance(tier, NoTier)
        with monkeypatch.context() as patched:
            patched.setattr(tier.writes, "_write", no_memory)
            cache.release(computed(cache, "text"))
        assert tier.writes.is_idle and tier.writes.wait_drained(0.0)
        assert cache.stats().num_failed_steps["write_out"]
        assert cache.storage.flush(5.0)
        caplog.clear()
