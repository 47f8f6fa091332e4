"""What fails beside a verb costs what it was about: nothing else stops, and it is counted."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Run, Tier
from fastdeploy_cache.books.transfer import Segment
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.metrics.picture import STEPS
from fastdeploy_cache.movement import cargo
from fastdeploy_cache.transfer_manager.task import TransferTask
from tests.rigs.cache_model import CacheModel
from tests.rigs.simulated_client import SimulatedClient

CALLED = ("use", "grow", "push", "victim")  # by any story; the others by some
A, B, C = ([base + i for i in range(24)] for base in (1000, 2000, 3000))


def failed_steps(model: CacheModel) -> dict[str, int]:
    """Those that have failed at all."""
    return {step: n for step, n in model.cache.stats().num_failed_steps.items() if n}


class Broken(LeastRecentlyUsed):
    """A policy that raises in one of its methods, from its n-th call on."""

    def __init__(self, method: str, num_calls: int) -> None:
        super().__init__(lambda: 0.0)
        work = getattr(self, method)
        left = iter(range(num_calls))

        def call(*args: Any) -> Any:
            if next(left, None) is None:
                raise ZeroDivisionError(method)
            return work(*args)

        setattr(self, method, call)


@pytest.mark.parametrize("num_calls", [0, 3])
@pytest.mark.parametrize("method", [*CALLED, "touch", "alike", "coldest", "is_colder", "shrink"])
def test_a_policy_that_raises_is_replaced(method: str, num_calls: int) -> None:
    """No verb fails by it: from then on the least recently used goes first, in the order known before."""
    client = SimulatedClient(12, 12)
    config = CacheConfig(block_size=4, num_gpu_blocks=12, num_cpu_blocks=12, transfer_client="inline")
    model = CacheModel(4, 12, 12, write_policy="write_back")
    model.cache.close()
    model.client = client
    model.cache = PrefixCacheManager(config, client=client, policy=Broken(method, num_calls))
    for _ in range(3):
        for text in (A, B, C):
            for length in (9, 24, 13):
                model.serve(text[:length], stays=False, patient=True)
                model.check()
    assert failed_steps(model) in ({"policy": 1}, {}), "it was asked again after it had failed"
    assert failed_steps(model) or method not in CALLED
    model.steps_may_fail = True
    model.finish()


@pytest.mark.parametrize("named", [None, (None, 1), (object(), 1), ("run", 1), "xy", (1, 2, 3)])
def test_a_policy_that_names_no_run_is_replaced(named: object) -> None:
    """Whatever it answers: the verb that had to evict does so."""
    config = CacheConfig(block_size=4, num_gpu_blocks=12, num_cpu_blocks=0, transfer_client="inline")
    model = CacheModel(4, 12, 0)
    model.cache.close()
    model.client = SimulatedClient(12, 0)
    policy = LeastRecentlyUsed(lambda: 0.0)
    policy.victim = lambda tier, num_blocks: named  # type: ignore[method-assign,assignment,return-value]
    model.cache = PrefixCacheManager(config, client=model.client, policy=policy)
    for text in (A, B, C):
        model.serve(text, stays=False, patient=True)
    assert failed_steps(model) == {"policy": 1} and model.cache.stats().gpu.num_evicted
    model.steps_may_fail = True
    model.finish()


class NamesWhatIsHeld(LeastRecentlyUsed):
    """Wants a run to be evicted whatever holds it."""

    def __init__(self) -> None:
        super().__init__(lambda: 0.0)
        self.last: Run | None = None

    def grow(self, run: Run, first_block: int) -> None:
        self.last = run

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:
        assert self.last is not None
        return self.last, num_blocks


def test_a_policy_that_names_a_held_run_is_replaced() -> None:
    """Nothing that a request reads is evicted, whatever a policy says."""
    config = CacheConfig(block_size=4, num_gpu_blocks=12, num_cpu_blocks=0, transfer_client="inline")
    model = CacheModel(4, 12, 0)
    model.cache.close()
    model.client = SimulatedClient(12, 0)
    model.cache = PrefixCacheManager(config, client=model.client, policy=NamesWhatIsHeld())
    model.serve(A, stays=False, patient=True)
    model.serve(B, stays=True, patient=True)
    model.serve(C, stays=False, patient=True)
    assert failed_steps(model) == {"policy": 1}
    model.steps_may_fail = True
    model.finish()


def broken_landing(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """The next segment does not land: a fault of ours that nobody knows yet. Returns what mends it."""
    land = cargo.land

    def fail(self: PrefixTree, segment: Segment, succeeded: bool) -> int:
        raise ZeroDivisionError("landing")

    monkeypatch.setattr(cargo, "land", fail)
    return lambda: monkeypatch.setattr(cargo, "land", land)


def test_a_landing_that_raises_costs_one_task(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits for it is answered and called; its blocks are nobody's from then on; the next task lands."""
    model = CacheModel(4, 12, 24)
    model.serve_and_copy(A)
    model.kv_lost()
    live = model.must_match(A)
    called = list[str]()
    live.match.on_ready(lambda: called.append("ready"))
    mend = broken_landing(monkeypatch)
    model.client.land_all()
    mend()
    assert called == ["ready"] and live.match.poll().num_tokens == 0 and live.match.poll().ready
    stats = model.cache.stats()
    assert (failed_steps(model), stats.num_quarantined_blocks) == ({"landing": 1}, 5)
    assert (stats.gpu.num_in_flight, stats.num_transfers_in_flight) == (5, 0)
    model.check()
    model.release(live)
    model.serve_and_copy(B)
    model.cache.ranks.kv_lost(0)
    again = model.must_match(B)
    model.client.land_all()
    assert len(model.settle(again)) == 5
    model.release(again)
    model.check()
    text = "".join(str(metric) for metric in model.cache.metrics.collect())
    assert "failed_steps" in text and "quarantined_blocks" in text
    model.cache.close()


class Raising(SimulatedClient):
    """A client that takes no task."""

    def submit(self, task: TransferTask) -> None:
        raise ZeroDivisionError("submit")


def test_a_client_that_raises_has_not_taken_the_task() -> None:
    """It is answered as failed: no block stays with a task that nobody will end."""
    config = CacheConfig(
        block_size=4, num_gpu_blocks=12, num_cpu_blocks=24, transfer_client="inline", cpu_write_policy="write_through"
    )
    model = CacheModel(4, 12, 24)
    model.cache.close()
    model.client = Raising(12, 24)
    model.cache = PrefixCacheManager(config, client=model.client)
    model.serve(A, stays=False, patient=True)
    assert (model.cache.stats().cpu.num_in_flight, model.cache.stats().num_transfers_in_flight) == (0, 0)
    model.steps_may_fail = True
    model.finish()


def test_all_steps_are_counted_from_the_start() -> None:
    """An alert on the metric needs a zero to begin with."""
    model = CacheModel(4, 12, 24)
    assert model.cache.stats().num_failed_steps == dict.fromkeys(STEPS, 0)
    model.steps_may_fail = True
    model.finish()


def test_a_log_that_raises_fails_nobody() -> None:
    """What an application's filter raises costs the line; and a line names the module that has written it."""
    records = list[logging.LogRecord]()

    class Filter(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            records.append(record)
            raise ZeroDivisionError("filter")

    log, broken = logging.getLogger("fastdeploy_cache.test"), Filter()
    log.addFilter(broken)
    try:
        event_log(log.name).error("event=%s", "x")
    finally:
        log.removeFilter(broken)
    assert [record.pathname for record in records] == [__file__]
