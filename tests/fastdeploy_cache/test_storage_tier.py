"""Prefixes go to storage and come back, on simulated memory: what is found, when, and what is given up."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask
from tests.rigs.simulated_storage import SimulatedStorage
from tests.rigs.storage_rig import STORE, A, Rig, stored
from tests.rigs.storage_trouble import metric


def test_what_one_engine_wrote_another_finds() -> None:
    """Written at release, found by a prefetch of an empty cache, counted as storage hits, right in every block."""
    objects = stored(A)
    assert len(objects) == 10
    rig = Rig(objects)
    rig.know(A)
    rig.prefetch(A)
    rig.store.land_all()
    live = rig.match(A)
    rig.model.client.land_all()
    assert len(rig.model.settle(live)) == 10
    match = live.match.poll()
    assert (match.num_storage_tokens, match.num_cpu_tokens, match.num_gpu_tokens) == (40, 0, 0)
    assert rig.model.allocate(live, 1)
    assert rig.model.cache.stats().hit_rates["storage"] == pytest.approx(40 / 41)
    rig.finish()


@pytest.mark.parametrize("policy", ["write_back", "write_through", "write_through_selective"])
def test_storage_that_is_written_through_is_so_whatever_the_cpu_tier_does(policy: str) -> None:
    """All that is committed is copied down and written at once, whatever `cpu_write_policy` says."""
    rig = Rig(write_policy=policy, cpu_write_min_uses=3)
    rig.model.serve_and_copy(A)
    rig.land_all()
    assert len(rig.store.objects) == 10
    rig.finish()


def test_writes_do_not_wait_for_a_probe_that_got_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store has been opened, and the look at how fast it is fails: what was queued before is written all the same."""
    rig = Rig()
    tier, rig.model.steps_may_fail = rig.model.cache.storage._tier, True
    tier._was_open = rig.store.up = False
    rig.model.serve_and_copy(A)
    rig.land_all()
    assert not rig.store.objects and not tier.is_idle

    def probe() -> None:
        raise MemoryError

    monkeypatch.setattr(tier.link, "probe", probe)
    rig.store.up = True
    tier.on_ready()
    rig.land_all()
    assert len(rig.store.objects) == 10 and tier.is_idle
    assert rig.model.cache.stats().num_failed_steps["client"] == 1
    rig.finish()


def test_only_what_is_missing_is_written() -> None:
    """A longer prompt over a stored prefix writes its own blocks alone."""
    rig = Rig()
    rig.model.serve_and_copy(A[:21])
    rig.land_all()
    written: list[int] = []
    land = rig.store.land

    def note(error: str | None = None) -> None:
        task = rig.store.tasks[0]
        written.append(len(task.source_ids) if task.kind is TaskKind.WRITE else 0)
        land(error)

    rig.store.land = note  # type: ignore[method-assign]
    rig.model.serve_and_copy(A)
    rig.land_all()
    assert sum(written) == 5
    rig.finish()


def test_a_match_grows_while_storage_reads() -> None:
    """Each piece is loaded to the GPU while the next is read, and the match waits for all of it."""
    objects = stored(A)
    rig = Rig(objects, num_cpu=12, max_prefetch_share=1.0)
    rig.know(A)
    rig.prefetch(A)
    rig.store.land()  # the look-up
    assert len(rig.store.tasks) == 2  # pieces of three blocks, a quarter of the CPU pool; the others follow
    live = rig.match(A)
    assert not live.match.ready
    rig.store.land()
    assert [task.kind for task in rig.model.client.tasks] == [TaskKind.SWAP_IN]
    assert live.match.poll().num_coming_tokens == 40
    rig.land_all()
    assert live.match.poll().num_tokens == 40
    rig.finish()


def test_best_effort_waits_for_nothing() -> None:
    """A match takes what has landed; the rest is cancelled."""
    rig = Rig(stored(A), num_cpu=12, max_prefetch_share=1.0, prefetch_policy="best_effort")
    rig.know(A)
    rig.prefetch(A)
    rig.store.land()
    rig.store.land()
    live = rig.match(A)
    rig.model.client.land_all()
    assert (live.match.poll().ready, live.match.poll().num_tokens) == (True, 12)
    assert len(rig.store.cancelled) == 2
    rig.finish()


@pytest.mark.parametrize("num_whole", [0, 4])
def test_what_does_not_come_whole_is_a_miss(num_whole: int) -> None:
    """A store that lied about existence, or whose object is damaged: the blocks before count, none behind."""
    rig = Rig(stored(A))
    rig.know(A)
    rig.store.max_read = num_whole
    rig.prefetch(A)
    rig.store.land_all()
    live = rig.match(A)
    rig.model.client.land_all()
    assert live.match.poll().num_tokens == 4 * num_whole
    rig.finish()


def test_an_empty_store_costs_no_room() -> None:
    """Room in the CPU tier is taken only for what exists."""
    rig = Rig()
    rig.prefetch(A)
    assert rig.model.cache.stats().cpu.num_in_flight == 0
    rig.store.land_all()
    assert rig.model.cache.stats().cpu.num_in_flight == 0
    assert rig.match(A).match.ready
    rig.finish()


def test_failures_open_the_breaker_and_a_probe_closes_it() -> None:
    """After three failures in a row nothing is asked; once the pause is over a probe goes first, and all is well."""
    rig = Rig(stored(A))
    tier = rig.model.cache.storage._tier
    assert tier is not None
    for _ in range(3):
        rig.prefetch(A)
        rig.store.land("timed out")
    assert tier.link.reading.state is BreakerState.OPEN
    rig.prefetch(A)
    assert not rig.store.tasks
    tier.link.reading._probe_at = 0.0
    rig.prefetch(A)
    assert [task.kind for task in rig.store.tasks] == [TaskKind.PROBE]
    rig.store.land_all()
    assert tier.link.reading.state is BreakerState.CLOSED
    rig.prefetch(A)
    assert [task.kind for task in rig.store.tasks] == [TaskKind.LOOKUP]
    rig.finish()


def test_a_write_keeps_nobody_from_evicting() -> None:
    """While a slow store reads CPU blocks they may be evicted; their ids are given out only when it has ended."""
    rig = Rig(num_cpu=16)
    rig.model.serve_and_copy(A)
    assert rig.store.tasks
    stats = rig.model.cache.stats()
    assert stats.gpu.num_protected == stats.cpu.num_protected == 0
    rig.model.reset()
    rig.model.check()
    assert rig.model.cache.stats().cpu.num_in_flight == len(rig.store.tasks[0].source_ids)
    rig.land_all()
    assert rig.model.cache.stats().cpu.num_free == 16
    rig.finish()


def test_outputs_may_be_kept_out() -> None:
    """Without `cache_outputs` blocks that hold output tokens are neither found nor stored."""
    rig = Rig(cache_outputs=False)
    live = rig.match(A[:9])
    live.request.append_output(A[9:21])
    assert rig.model.allocate(live, 6)
    rig.model.compute(live, 20)
    rig.model.release(live)
    rig.land_all()
    assert len(rig.store.objects) == 2
    rig.finish()


def test_a_store_slower_than_computing_is_not_asked() -> None:
    """With `auto`, a prefetch starts only where loading has been seen to be faster than computing."""
    rig = Rig(stored(A), load_policy="auto", prefill_tokens_per_second=1000.0)
    speeds = rig.model.cache._movement.speeds
    speeds._block_bytes = 1000
    speeds.storage.note(1000, 10.0)
    rig.prefetch(A)
    assert not rig.store.tasks
    speeds.forget_storage()
    speeds.storage.note(1000, 1e-6)
    rig.prefetch(A)
    assert rig.store.tasks
    rig.finish()


def test_a_store_is_attached_once_and_detached_at_any_time() -> None:
    """What is on its way ends as failed, blocks go home, and the cache goes on without."""
    rig = Rig(stored(A))
    with pytest.raises(ConfigError, match="detach it first"):
        rig.model.cache.storage.attach(STORE, client=rig.store)
    rig.prefetch(A)
    rig.store.land()
    rig.model.cache.storage.detach()
    rig.model.check()
    assert rig.model.cache.stats().cpu.num_in_flight == 0
    live = rig.match(A)
    assert live.match.ready
    rig.model.finish()


def test_a_store_that_opens_after_its_detach_is_lent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread had no processor until then: no block goes to a probe that nobody would answer for."""
    rig = Rig()
    cache = rig.model.cache
    cache.storage.detach()
    opened: list[Callable[[], None]] = []
    late = SimulatedStorage(rig.model.client)
    monkeypatch.setattr(late, "start", lambda _, on_ready: opened.append(on_ready))
    cache.storage.attach(STORE, client=late)
    cache.storage.detach()
    late.up = True  # as a client is whose end could not be waited for
    opened[0]()
    assert not late.tasks and cache.stats().cpu.num_in_flight == 0
    cache.check_invariants()
    rig.model.finish()


def test_what_comes_late_from_the_store_of_other_weights_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread had no processor, so it neither heard that nobody wants the read any more, nor was waited for. What it
    has read joins nothing: these are bytes of the old weights."""
    rig = Rig(stored(A))
    storage = rig.model.cache.storage
    rig.prefetch(A)
    rig.store.land()  # the look-up; what it has found is being read
    monkeypatch.setattr(rig.store, "cancel", lambda _: None)
    monkeypatch.setattr(rig.store, "stop", lambda: None)
    storage.detach()
    storage.attach(dataclasses.replace(STORE, weights_id="w2"), client=SimulatedStorage(rig.model.client))
    late = [task.kind for task in rig.store.tasks]
    rig.store.land_all()
    assert late and set(late) == {TaskKind.PREFETCH}
    assert rig.model.match(A).match.num_tokens == 0 and rig.model.cache.stats().cpu.num_cached == 0
    rig.finish()


def test_what_was_queued_goes_with_a_detached_store() -> None:
    """It will not be written any more, and keeps nothing of the store: neither its signals nor its place in the list of
    those that still have answers to give."""
    rig = Rig()
    storage = rig.model.cache.storage
    rig.store.up = False
    rig.model.serve_and_copy(A)
    tier = storage._tier
    assert isinstance(tier, StorageTier) and not tier.writes.is_idle
    storage.detach()
    assert tier.writes.is_idle and tier.writes.wait_drained(0) and tier.writes.num_skipped_blocks == 10
    assert storage.is_idle and not storage._beside
    rig.model.finish()


def test_what_was_queued_while_the_store_was_away_is_written_when_it_is_back() -> None:
    """Without a further request: its processes say that they are ready."""
    rig = Rig()
    rig.store.up = False
    rig.model.serve_and_copy(A)
    assert not rig.store.tasks and not rig.store.objects
    tier = rig.model.cache.storage._tier
    assert tier is not None and not tier.writes.wait_drained(0)
    rig.store.come_back()
    rig.land_all()
    assert len(rig.store.objects) == 10 and tier.writes.wait_drained(0)
    rig.finish()


def test_a_store_that_is_away_for_long_costs_no_memory() -> None:
    """What leaves the CPU tier unwritten leaves the queue, too."""
    rig = Rig()
    rig.store.up = False
    for number in range(700):
        rig.model.serve_and_copy([1000 + number] * 9)
    tier = rig.model.cache.storage._tier
    assert tier is not None and len(tier.writes._queue) <= 256
    rig.store.come_back()
    rig.land_all()
    assert 0 < len(rig.store.objects) <= 32
    rig.finish()


def test_what_a_store_counts_is_counted_once_in_whatever_order_its_answers_come() -> None:
    """Reads and writes are answered beside each other: a count from before is not taken for another process's, and
    one of a process that has ended changes nothing."""
    rig = Rig()
    link = rig.model.cache.storage._tier.link
    none = np.empty(0, np.int32)
    task = TransferTask(task_id=1, kind=TaskKind.LOOKUP, source_ids=none, destination_ids=none, deadline=0.0)
    for opened_ns, num_evicted in ((7, 100), (7, 150), (7, 140), (7, 160), (9, 4), (7, 165), (9, 3), (9, 10)):
        counts = {"num_evicted": num_evicted, "opened_ns": opened_ns}
        link.judge(TransferResult(task=task, ranks=(RankResult(rank=0, counts=counts),)))
    stats = rig.model.cache.stats().storage
    assert stats is not None and stats.num_evicted_objects == 160 + 10
    rig.finish()


def test_what_was_counted_of_storage_goes_on_over_stores_and_their_processes() -> None:
    """A counter of metrics never falls: not when another store comes (as for new weights), not while there is none, and
    not when a store's process is started again, which counts what it has lost from nothing."""
    rig = Rig()
    cache = rig.model.cache
    rig.store.counts = {"num_evicted": 5, "num_declined": 1}
    rig.model.serve_and_copy(A)
    rig.land_all()

    def counted() -> tuple[int, ...]:
        blocks = metric(cache, "storage_blocks_total", fate="written")
        lost = [metric(cache, "storage_lost_objects_total", reason=reason) for reason in ("evicted", "declined")]
        return blocks, *lost

    assert counted() == (10, 5, 1)
    rig.store.counts = {"num_evicted": 2, "num_declined": 1, "opened_ns": 1}  # of a process in the place of the other
    rig.model.serve_and_copy([900, *A])
    rig.land_all()
    assert counted() == (20, 7, 2)
    cache.storage.detach()
    assert counted() == (20, 7, 2) and metric(cache, "storage_up") == 0
    rig.store = SimulatedStorage(rig.model.client)
    cache.storage.attach(STORE, client=rig.store)
    rig.model.serve_and_copy([800, *A])
    rig.land_all()
    assert counted() == (30, 7, 2) and cache.stats().storage.num_written_blocks == 10  # type: ignore[union-attr]
    rig.finish()
