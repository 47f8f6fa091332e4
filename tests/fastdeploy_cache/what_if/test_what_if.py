"""The process beside the engine: what it is told, what it answers, and how it ends."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator

import pytest

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.request import Image
from tests.rigs.leaks import child_pids

pytestmark = pytest.mark.processes
SIZE = 4


def config_of(**given: object) -> CacheConfig:
    return CacheConfig(block_size=SIZE, num_gpu_blocks=20, transfer_client="inline", **given)  # type: ignore[arg-type]


@pytest.fixture
def cache() -> Iterator[PrefixCacheManager]:
    with PrefixCacheManager(config_of(prefill_tokens_per_second=100.0)) as cache:
        yield cache


def serve(cache: PrefixCacheManager, name: str, tokens: list[int], images: list[Image] | None = None) -> None:
    request = Request(request_id=name, prompt_token_ids=tokens, images=images or [])
    match = cache.match(request)
    cache.allocate(request, -(-len(tokens) // SIZE) - len(match.block_ids))
    cache.commit(request, len(tokens))
    cache.release(request)


def prompt(number: int) -> list[int]:
    return list(range(number * 100, number * 100 + 5 * SIZE + 1))


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline, nap = time.monotonic() + 30, 0.001
    while not is_so():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(nap)


def test_a_larger_tier_would_hit_and_a_smaller_one_less(cache: PrefixCacheManager) -> None:
    """Six prompts in turn do not fit into 20 blocks: under lru none hits; twice as many blocks hit all but the first
    round, and what that saves is told."""
    assert cache.insight.what_if() == []
    for i in range(120):
        serve(cache, str(i), prompt(i % 6))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 120)
    rates = {(rate.tier, rate.factor): rate for rate in cache.insight.what_if()}
    assert {policy for rate in rates.values() for policy in (rate.policy,)} == {"lru"}
    assert rates["gpu", 0.5].token_hit_rate == rates["gpu", 1.0].token_hit_rate == 0
    most = 114 / 120 * 20 / 21
    assert rates["gpu", 2.0].token_hit_rate == pytest.approx(most) and rates["gpu", 2.0].num_blocks == 40
    assert rates["gpu", 2.0].saved_seconds == pytest.approx(114 * 20 / 100)
    assert all(rate.most_token_hit_rate == pytest.approx(most) for rate in rates.values())
    assert rates["cpu", 1.0].token_hit_rate > 0.4 and rates["cpu", 1.0].num_blocks == 20  # there is none now
    cache.check_invariants()


def test_ten_requests_are_enough_for_an_answer(cache: PrefixCacheManager) -> None:
    """Nothing is said after nine; and no bound where requests were left out, which others may have hit."""
    cache.insight.what_if()
    for i in range(9):
        serve(cache, str(i), prompt(0))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 9)
    assert cache.insight.what_if() == []
    serve(cache, "9", prompt(0))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 10)
    assert [rate.most_token_hit_rate for rate in cache.insight.what_if()] == [pytest.approx(9 * 20 / 210)] * 8
    references = cache._books.references
    assert references is not None
    references.num_lost = 1
    assert {rate.most_token_hit_rate for rate in cache.insight.what_if()} == {None}


def test_a_reset_and_an_image_count(cache: PrefixCacheManager) -> None:
    """What was used before a reset would not be hit, nor the same tokens with another image."""
    cache.insight.what_if()
    for i in range(60):
        image = Image(offset=0, length=SIZE, hash=bytes([i]) * 8)
        serve(cache, str(i), prompt(0), [image])
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 60)
    assert {rate.token_hit_rate for rate in cache.insight.what_if()} == {0.0}
    for i in range(60):
        cache.reset()
        serve(cache, f"again {i}", prompt(1))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 120)
    assert {rate.token_hit_rate for rate in cache.insight.what_if()} == {0.0}


def test_another_policy_is_estimated_when_it_is_in_force(cache: PrefixCacheManager) -> None:
    """Of what is used from then on; back under `lru`, which was estimated all the while, nothing begins anew."""
    before = child_pids()
    cache.insight.what_if()
    for i in range(60):
        serve(cache, str(i), prompt(i % 6))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 60)
    cache.control.set_policy("mru")
    assert cache.insight.what_if() == []
    for i in range(60, 150):
        serve(cache, str(i), prompt(i % 6))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 90)
    pids = child_pids() - before
    rates = {(rate.tier, rate.factor, rate.policy): rate.token_hit_rate for rate in cache.insight.what_if()}
    assert rates["gpu", 1.0, "lru"] == 0 < rates["gpu", 1.0, "mru"]
    cache.control.set_policy("lru")
    assert {rate.policy for rate in cache.insight.what_if()} == {"mru", "lru"}
    assert child_pids() - before == pids and len(pids) == 1


def test_the_metrics_page_starts_it_and_shows_it(cache: PrefixCacheManager) -> None:
    """The gauges come when there are enough requests; the process goes with the cache."""
    before = child_pids()
    url = cache.serve_metrics()
    (pid,) = child_pids() - before
    for i in range(100):
        serve(cache, str(i), prompt(i % 6))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 100)
    page = urllib.request.urlopen(url, timeout=5).read().decode()
    line = 'fastdeploy_cache_what_if_hit_rate{dp="0",factor="4",policy="lru",tier="gpu"} 0.8'
    assert line in page and 'fastdeploy_cache_what_if_lost_requests_total{dp="0"} 0.0' in page
    cache.close()
    assert pid not in child_pids()


def test_a_killed_process_costs_its_estimates_only(cache: PrefixCacheManager) -> None:
    """The cache serves on, and shows no rates any more."""
    before = child_pids()
    cache.insight.what_if()
    (pid,) = child_pids() - before
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    for i in range(100):
        serve(cache, str(i), prompt(i % 3))
    wait_until(lambda: not cache._seen.start_what_if().num_lost_requests and pid not in child_pids())
    assert cache.stats().hit_rates["token"] > 0.5
    cache.check_invariants()


def test_a_stopped_process_holds_nobody_up(cache: PrefixCacheManager) -> None:
    """What it does not read is counted as lost when there is too much of it; the cache serves on and closes."""
    before = child_pids()
    cache.insight.what_if()
    (pid,) = child_pids() - before
    os.kill(pid, signal.SIGSTOP)
    with cache._books:
        references = cache._books.references
        assert references is not None
        for _ in range(5000):
            references.note([], Request(request_id="a", prompt_token_ids=[1]), 0)
        cache._books._calls.clear()
    assert cache._seen.what_if_counts().num_lost_requests == 5000 - 4096
    serve(cache, "b", prompt(0))
    cache.close()
    assert pid not in child_pids()


def test_it_can_be_left_out() -> None:
    """With `insight.what_if` off no process is started, and nothing is shown."""
    before = child_pids()
    with PrefixCacheManager(config_of(insight=InsightConfig(what_if=False))) as cache:
        cache.serve_metrics()
        assert cache.insight.what_if() == [] and child_pids() == before


def test_the_doctor_says_how_many_blocks_would_do(cache: PrefixCacheManager) -> None:
    """Its advice on a cache that is too small names a size of the CPU tier, and what that would hit."""
    cache.insight.what_if()
    for i in range(120):
        serve(cache, str(i), prompt(i % 6))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 120)
    (finding,) = cache.examine()
    assert finding.name == "gpu_short"
    assert "0% would hit as it is, with 40 blocks in the CPU tier 90%" in finding.advice
    assert "with 40 blocks in the GPU pool 90%" in finding.advice


def test_one_process_is_started_by_many_threads(cache: PrefixCacheManager) -> None:
    """Six that ask first at the same time start one, which the cache ends; a closed cache starts none."""
    before, together = child_pids(), threading.Barrier(6)

    def ask() -> None:
        together.wait()
        cache.insight.what_if()

    threads = [threading.Thread(target=ask) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(child_pids() - before) == 1
    cache.close()
    assert cache.insight.what_if() == [] and child_pids() == before


def test_it_ends_with_an_engine_that_has_forked() -> None:
    """A child of the engine, which has all its descriptors, does not keep it."""
    program = (
        "import os, signal, sys, time\n"
        "from fastdeploy_cache import CacheConfig, PrefixCacheManager\n"
        "cache = PrefixCacheManager(CacheConfig(num_gpu_blocks=8, transfer_client='inline'))\n"
        "cache.insight.what_if()\n"
        "print(cache._seen.start_what_if()._process.pid, flush=True)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os.close(1)\n"
        "    sys.stdin.read()\n"
        "    os._exit(0)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None and engine.stdin is not None
        pid = int(engine.stdout.readline())
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            pidfd = os.pidfd_open(pid)
            ended, _, _ = select.select([pidfd], [], [], 20)
            os.close(pidfd)
            assert ended, "it outlived its engine"


def test_it_ends_with_its_engine_whatever_it_works_on() -> None:
    """It does not look at the engine between two pieces only: one piece may keep it at work for half a minute."""
    program = (
        "import os, signal, sys\n"
        "from fastdeploy_cache import CacheConfig, PrefixCacheManager\n"
        "from fastdeploy_cache.books.references import HEADER\n"
        "from fastdeploy_cache.insight.what_if import what_if\n"
        "os.environ['PYTHONPATH'] = os.pathsep.join([os.getcwd(), *sys.path])\n"
        "what_if._PROGRAM = 'tests.rigs.busy_what_if'\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "cache = PrefixCacheManager(CacheConfig(num_gpu_blocks=8, transfer_client='inline'))\n"
        "process = cache._seen.start_what_if()._process\n"
        "os.write(process.stdin.fileno(), HEADER.pack(HEADER.size, 0.0, 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, 0))\n"
        "signal.sigwait({signal.SIGUSR1})\n"
        "print(process.pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as engine:
        assert engine.stdout is not None
        pidfd = os.pidfd_open(int(engine.stdout.readline()))
        engine.kill()
        ended, _, _ = select.select([pidfd], [], [], 20)
        with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        assert ended, "it outlived its engine"


def test_there_is_no_bound_where_something_is_cached_already(cache: PrefixCacheManager) -> None:
    """What was used before the process came it has not seen, and a cache may hit it."""
    for i in range(3):
        serve(cache, f"before{i}", prompt(i))
    assert cache.insight.what_if() == []
    for i in range(12):
        serve(cache, str(i), prompt(i % 3))
    wait_until(lambda: cache._seen.start_what_if().num_seen_requests == 12)
    rates = cache.insight.what_if()
    assert rates and all(rate.most_token_hit_rate is None for rate in rates)
