"""The engine's verbs go on whatever becomes of the ranks."""

from __future__ import annotations

import dataclasses
import logging
import os
import signal
import threading
from collections.abc import Callable

import pytest

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.books.block_pool import Owner
from fastdeploy_cache.errors import RankStartError
from fastdeploy_cache.transfer_manager.task import TransferResult
from tests.rigs.faulty_engine import BLOCK_SIZE, Engine, new_config
from tests.rigs.process_ends import SECONDS, is_gone, pids, wait_exit, watched
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

PROMPT = list(range(100, 100 + 5 * BLOCK_SIZE + 1))
FILLERS = [[1000 * other + i for i in range(8 * BLOCK_SIZE)] for other in range(1, 4)]


def push_out(engine: Engine) -> None:
    """Fill the GPU pool of eight blocks with other prefixes."""
    for filler in FILLERS:
        engine.serve(filler)


def test_a_ranks_death_keeps_the_cpu_tier(eventually: Callable[..., None]) -> None:
    """Killed while idle: after the restart a prefix from before is a CPU hit with the right bytes on every rank."""
    with PrefixCacheManager(new_config(2, num_gpu=8, num_cpu=60)) as cache:
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        push_out(engine)
        for pid in pids(cache._movement.client):
            os.kill(pid, signal.SIGKILL)
        eventually(lambda: [status.num_restarts for status in cache.stats().ranks] == [1, 1])
        assert cache._movement.client.wait_ready(SECONDS)
        assert engine.serve(PROMPT).num_cpu_tokens == 5 * BLOCK_SIZE
        cache.check_invariants()


def test_a_rank_killed_in_a_load_is_a_miss(eventually: Callable[..., None]) -> None:
    """The load fails at once, its ids are free again, the request computes; later the same prefix is loaded."""
    with PrefixCacheManager(new_config(2, 8, 60, task_timeout_seconds=1000.0)) as cache:
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        push_out(engine)
        victim = pids(cache._movement.client)[1]
        stopped(victim)
        request = Request(request_id="load", prompt_token_ids=PROMPT)
        match = cache.match(request)
        assert match.num_coming_tokens == 5 * BLOCK_SIZE and cache.stats().gpu.num_in_flight == 5
        eventually(lambda: [each.waiting for each in cache._movement.client._processes.io.tasks.flights.all()] == [{1}])
        os.kill(victim, signal.SIGKILL)
        match = match.wait(SECONDS)
        assert match.ready and match.num_tokens == 0
        assert cache.stats().gpu.num_in_flight == 0
        cache.release(request)
        eventually(lambda: cache.stats().ranks[1].num_restarts == 1)
        assert cache._movement.client.wait_ready(SECONDS)
        assert engine.serve(PROMPT, SECONDS).num_cpu_tokens == 5 * BLOCK_SIZE
        cache.check_invariants()


def test_ids_of_a_hung_load_are_not_used_before_the_rank_is_gone() -> None:
    """While a stopped rank may still write, its destinations belong to the task; they go home when it is reaped."""
    with PrefixCacheManager(new_config(2, 8, 60, task_timeout_seconds=1.0)) as cache:
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        push_out(engine)
        victim = pids(cache._movement.client)[0]
        with watched(victim) as pidfd:
            seen: list[tuple[bool, int]] = []
            finish = cache._movement.mover._finish

            def note(result: TransferResult) -> None:
                seen.append((is_gone(pidfd), cache._books.pools[0].count(Owner.TASK)))
                finish(result)

            cache._movement.mover._finish = note  # type: ignore[method-assign]
            stopped(victim)
            request = Request(request_id="hung", prompt_token_ids=PROMPT)
            cache.match(request)
            cache.release(request)  # the request goes, the task and its ids stay
            assert cache.stats().gpu.num_in_flight == 5
            assert cache.wait_for_transfers(SECONDS)
            cache._movement.mover._finish = finish  # type: ignore[method-assign]
        assert seen == [(True, 5)], "the old rank was gone when the ids were still the task's"
        assert cache.stats().gpu.num_in_flight == 0
        assert cache._movement.client.wait_ready(SECONDS) and pids(cache._movement.client)[0] != victim
        cache.check_invariants()


def test_too_many_deaths_leave_an_engine_without_a_cpu_tier(eventually: Callable[..., None]) -> None:
    """The tiers below are off: GPU hits go on, CPU hits are zero, nothing raises and the books add up."""
    with PrefixCacheManager(new_config(2, 8, 60, max_restarts=0)) as cache:
        engine = Engine(cache, 2)
        engine.serve(PROMPT)
        push_out(engine)
        with watched(pids(cache._movement.client)[1]) as pidfd:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            assert wait_exit(pidfd)
        eventually(lambda: not cache.stats().ranks[1].up)
        first, second = engine.serve(PROMPT), engine.serve(PROMPT)
        assert (first.num_tokens, first.num_cpu_tokens) == (0, 0)
        assert first.num_unloaded_tokens == 5 * BLOCK_SIZE, "and says what it did without"
        assert (second.num_gpu_tokens, second.num_cpu_tokens) == (5 * BLOCK_SIZE, 0)
        push_out(engine)
        assert cache.stats().num_transfers_in_flight == 0
        cache.check_invariants()


def test_killing_ranks_at_random_under_traffic_never_serves_a_wrong_byte() -> None:
    """Ranks die again and again between and in copies; every block that is readable is compared."""
    with PrefixCacheManager(new_config(2, 10, 60, max_restarts=1000, restart_backoff_seconds=0.0)) as cache:
        engine, over, num_kills = Engine(cache, 2), threading.Event(), 0

        def reaper() -> None:
            nonlocal num_kills
            while not over.is_set() and num_kills < 6:
                if cache._movement.client.wait_ready(SECONDS):
                    victim = cache.stats().ranks[num_kills % 2].pid
                    if victim is not None:
                        os.kill(victim, signal.SIGKILL)
                        num_kills += 1
                    over.wait(0.05)  # lets some tasks through between two deaths

        thread = threading.Thread(target=reaper)
        thread.start()
        number = 0
        try:
            while thread.is_alive() or number < 40:
                engine.serve([(7 * i * i + number % 5 * (i // 8)) % 50 for i in range(20 + number % 17)])
                number += 1
        finally:
            over.set()
            thread.join(SECONDS)
        assert num_kills == 6
        cache.check_invariants()


def test_a_failed_start_raises_and_leaves_nothing(rank_code: Callable[[str], None]) -> None:
    """The manager's constructor raises the rank's own words; processes and memory are gone (the leak fixture looks)."""
    rank_code("raise SystemExit('this installation is broken')")
    with pytest.raises(RankStartError, match=r"(?s)rank \d exited with code 1.*this installation is broken"):
        PrefixCacheManager(new_config(2, 8, 16))


def test_a_normal_end_is_no_alarm(caplog: pytest.LogCaptureFixture) -> None:
    """A program that ends at once has copies on their way, which `close` cancels: nothing of that is a warning."""
    config = dataclasses.replace(new_config(2, num_gpu=8, num_cpu=60), cpu_write_policy="write_back")
    for _ in range(3):
        with PrefixCacheManager(config) as cache:
            request = Request(request_id="only", prompt_token_ids=PROMPT)
            cache.match(request)
            cache.allocate(request, 6)
            cache.commit(request, len(PROMPT))
            cache.release(request)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []
