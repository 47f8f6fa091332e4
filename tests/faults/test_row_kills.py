"""A hybrid model over both tiers while ranks are killed: answers are those from scratch, and nothing is lost."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest

from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.transfer_manager.config import TransferConfig
from tests.rigs.float64_engine import WAIT_SECONDS, Float64Engine, serve
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

NUM_KILLS = int(os.environ.get("FASTDEPLOY_CACHE_ROW_KILLS", "48"))  # 200 in .ci/night
TRANSFER = TransferConfig(
    tp_size=2, max_restarts=10_000, restart_backoff_seconds=0.0, task_timeout_seconds=5.0, stop_timeout_seconds=2.0
)


class Killer:
    """Lets copies begin on ranks that do nothing, or work on, and kills one of them."""

    def __init__(self, engine: Float64Engine, most: int) -> None:
        """`most`: kills, after which it is quiet."""
        self._most = most
        self._engine, self._client, self._draw = engine, engine.cache._movement.client, engine.random
        self.num_kills = self.num_in_flight = 0
        self._is_held: int | None = None  # the pid of a rank that has been stopped
        self._num_calls = 0  # since then

    def __call__(self) -> None:
        """Before and after copies may be started. A rank that is stopped is killed when one is in flight, or soon."""
        if self._is_held is not None:
            self._num_calls += 1
            if self._engine.cache._movement.mover.in_flight or self._num_calls == 12:
                self._kill(self._is_held)
                self._is_held = None
        elif (
            self.num_kills < self._most
            and self._draw.random() < 0.04
            and (up := [s.pid for s in self._client.statuses() if s.up and s.pid])
        ):
            pid, self._num_calls = self._draw.choice(up), 0
            if self._draw.random() < 0.3:
                self._kill(pid)
            else:
                with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                    stopped(pid)
                    self._is_held = pid

    def _kill(self, pid: int) -> None:
        moving = self._engine.cache._movement.mover.in_flight
        self.num_in_flight += bool(moving)
        self.num_kills += 1
        with contextlib.suppress(ProcessLookupError):  # it was killed a moment ago, and is not reaped yet
            os.kill(pid, signal.SIGKILL)
        if self._draw.random() < 0.85:  # else the next verbs find the ranks down
            assert self._client.wait_ready(WAIT_SECONDS)

    def end(self) -> None:
        """Nothing stays stopped."""
        if self._is_held is not None:
            self._kill(self._is_held)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
def test_ranks_are_killed_in_loads_and_stores(policy: str) -> None:
    """All logits are bit-equal to those from scratch, and no block or unit is lost."""
    engine = Float64Engine(
        seed=5, num_gpu_blocks=36, num_gpu_units=(7, 16, 20), num_cpu_blocks=200, cpu_write_policy=policy,
        transfer_client="processes", transfer=TRANSFER,
    )  # fmt: skip
    killer = Killer(engine, NUM_KILLS // 2)
    with engine.cache:
        assert engine.cache.ranks.wait_ready(WAIT_SECONDS)
        num_rounds = 0
        # It goes on until something has come from the CPU tier: a few kills may have met each load.
        while killer.num_kills < NUM_KILLS // 2 or (not engine.num_cpu_tokens and num_rounds < 100):
            num_rounds += 1
            engine.disturb = killer
            serve(engine, 10, preempts=0.05)
        engine.disturb = lambda: None
        killer.end()
        assert engine.cache.wait_for_transfers(WAIT_SECONDS)
        assert killer.num_in_flight > killer.num_kills // 8, "hardly a kill has met a copy"
        assert engine.num_cpu_tokens > 0 and engine.num_hits > 0
        engine.cache.check_invariants()
        rows = engine.cache._books.rows
        assert rows is not None and not any(pool.pool.count(TASK) for pool in rows.checkpoints.pools)
