"""The benchmark of events: what publishing costs the engine's thread, and how fast a listener knows all."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.events import EventsConfig
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.events import Mirror
from fastdeploy_cache.events.journal import Note
from fastdeploy_cache.launch.bench.report import Figure, Report, at_most

_SIZE = 16
_FILLING, _REQUESTS = 3, 120
# blocks of a prompt, steps, rounds: more of these where a request is short, as its figure is a difference of large ones
_WORKLOADS = {"prompts of 64 blocks": (64, 0, 123), "a block with each step": (4, 60, 18)}
_POOL = 4_000  # blocks: full after a few rounds, so that each request evicts
_RUN_BLOCKS = 10  # of each prompt in the large cache
_MOST_SECONDS, _MOST_LOCK_MS, _MOST_CALL_US = 1.0, 1.0, 0.5
_WAIT_SECONDS = 60.0
Tokens = np.ndarray[Any, np.dtype[np.int32]]


def bench_events(json_file: Path | None, num_blocks: int) -> bool:
    """Measure both; whether the promises were kept. `num_blocks`: of the cache that a listener meets.

    Raises:
        LaunchError: a listener did not get to know all within a minute.
    """
    with Report(json_file) as report:
        _bench_calls(report)
        _bench_snapshots(report, num_blocks)
        return report.end()


@contextmanager
def _cache(num_blocks: int, *, is_published: bool) -> Iterator[PrefixCacheManager]:
    with tempfile.TemporaryDirectory(prefix="fastdeploy-events-") as folder:
        events = EventsConfig(endpoint=f"ipc://{folder}/kv") if is_published else None
        config = CacheConfig(
            block_size=_SIZE, num_gpu_blocks=num_blocks, num_cpu_blocks=0, transfer_client="inline", events=events
        )
        with PrefixCacheManager(config) as cache:
            yield cache


def _prompt(number: int, num_blocks: int) -> Tokens:
    tokens: Tokens = np.arange(num_blocks * _SIZE, dtype=np.int32)
    return tokens + np.int32(16 * number)


def _serve(cache: PrefixCacheManager, number: int, num_blocks: int, num_steps: int) -> None:
    """A prompt, and an output that fills a block with each step."""
    request = Request(request_id=f"{number}", prompt_token_ids=_prompt(number, num_blocks))
    match = cache.match(request)
    cache.allocate(request, num_blocks - len(match.block_ids))
    cache.commit(request, request.num_tokens)
    for step in range(num_steps):
        request.append_output(range(step * _SIZE, (step + 1) * _SIZE))
        cache.allocate(request, 1)
        cache.commit(request, request.num_tokens)
    cache.release(request)


def _bench_calls(report: Report) -> None:
    """Two caches in turn, one of which publishes. What that one costs more is shared out to the calls of its tap."""
    for name, (num_blocks, num_steps, num_rounds) in _WORKLOADS.items():
        with ExitStack() as stack:
            caches = {on: stack.enter_context(_cache(_POOL, is_published=on)) for on in (False, True)}
            num_calls = _calls_of_taps(num_blocks, num_steps)
            seconds = dict[bool, list[float]]({False: [], True: []})
            for number in range(num_rounds):
                for on in (False, True) if number % 2 else (True, False):
                    started = thread_time()
                    _serve_round(caches[on], number, num_blocks, num_steps)
                    if number >= _FILLING:
                        seconds[on].append((thread_time() - started) / _REQUESTS * 1e6)
            more = [(on - off) / num_calls for off, on in zip(seconds[False], seconds[True], strict=True)]
            off = Figure("without", median(seconds[False]), "us/request")
            report.line(
                f"Serving, {name}, {num_calls:.0f} calls of the tap in a request",
                off,
                Figure("with events", median(seconds[True]), "us/request", baseline=off),
                Figure("a call", median(more), "us", promise=at_most(f"a call of the tap, {name}, us", _MOST_CALL_US)),
            )


def _calls_of_taps(num_blocks: int, num_steps: int) -> float:
    """Intervals of blocks that come or go in a request, once the pool is full."""
    calls = list[int]()
    with _cache(_POOL, is_published=False) as cache:
        for number in range(2 * _FILLING):
            if number == _FILLING:
                taps = cache._books.tree.residency.taps  # noqa: SLF001
                taps.came += (lambda *_: calls.append(1),)
                taps.left += (lambda *_: calls.append(1),)
                taps.left_whole += (lambda *_: calls.append(1),)
            _serve_round(cache, number, num_blocks, num_steps)
    return len(calls) / _FILLING / _REQUESTS


def _serve_round(cache: PrefixCacheManager, number: int, num_blocks: int, num_steps: int) -> None:
    for each in range(number * _REQUESTS, (number + 1) * _REQUESTS):
        _serve(cache, each, num_blocks, num_steps)


def _bench_snapshots(report: Report, num_blocks: int) -> None:
    with _cache(num_blocks + 2_000, is_published=True) as cache:
        for number in range(num_blocks // _RUN_BLOCKS):
            _serve(cache, number, _RUN_BLOCKS, 0)
        _bench_telling(report, cache)
        events = cache.config.events
        assert events is not None
        is_over = threading.Event()
        traffic = threading.Thread(target=_go_on, args=(cache, is_over), daemon=True)
        seconds = []
        with Mirror(*events.endpoints(0)) as first:  # behind all that was told so far
            _wait(first)
        traffic.start()
        try:
            for _ in range(5):
                started = perf_counter()
                with Mirror(*events.endpoints(0)) as mirror:
                    _wait(mirror)
                    seconds.append(perf_counter() - started)
                    num_known = mirror.num_blocks("GPU")
        finally:
            is_over.set()
            traffic.join()
        report.line(
            f"A listener that comes to {num_known} blocks, beside traffic",
            Figure(
                "knows all after",
                median(seconds),
                "s",
                promise=at_most(f"a snapshot of {num_blocks} blocks, seconds", _MOST_SECONDS),
            ),
        )


def _bench_telling(report: Report, cache: PrefixCacheManager) -> None:
    """All is told anew, as to a new publisher; what the feed does under the lock, in its thread's time."""
    feed = cache._seen.events  # noqa: SLF001
    assert feed is not None
    tap, turns, num_begun = feed.tap, list[float](), feed.tap.num_begun
    is_told, take = threading.Event(), tap.take

    def timed_take(num_runs: int, num_token_bytes: int) -> list[Note]:
        started = thread_time()
        notes = take(num_runs, num_token_bytes)
        turns.append(thread_time() - started)
        if tap.num_begun > num_begun and not tap.is_behind:
            is_told.set()
        return notes

    tap.take = timed_take  # type: ignore[method-assign]
    feed.tell_anew()
    if not is_told.wait(_WAIT_SECONDS):
        raise LaunchError(f"the cache was not told anew within {_WAIT_SECONDS:.0f} s; see the log")
    tap.take = take  # type: ignore[method-assign]
    longest = at_most("the longest turn of a telling, ms", _MOST_LOCK_MS)
    report.line(
        f"{len(turns)} turns of the lock in which all is told",
        Figure("median", median(turns) * 1e3, "ms"),
        Figure("longest", max(turns) * 1e3, "ms", promise=longest),
    )


def _go_on(cache: PrefixCacheManager, is_over: threading.Event) -> None:
    number = 10**6
    while not is_over.wait(0.002):
        number += 1
        _serve(cache, number, _RUN_BLOCKS, 0)


def _wait(mirror: Mirror) -> None:
    if not mirror.wait_current(_WAIT_SECONDS):
        raise LaunchError(f"a listener did not get to know all within {_WAIT_SECONDS:.0f} s; see the log")
