"""An engine that computes nothing and notes what the cache's verbs cost it, in its thread's time."""

from __future__ import annotations

import dataclasses
import gc
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from time import thread_time_ns
from typing import Protocol, TypeVar

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.launch.bench.workloads import Tokens, Work, Workload

PHASES = ("request", "match", "allocate", "commit", "decode", "release")
STEP_TOKENS = 64  # output tokens for each decode step of a served request
T = TypeVar("T")


class Serving(Protocol):
    """Something that serves requests: our manager or another one. What was spent is by phase; hits are of prompts."""

    nanoseconds: dict[str, int]
    num_hit_tokens: int

    def serve(self, works: Iterable[Work]) -> None:
        """Serve all of `works`, adding to `nanoseconds`."""
        ...


class Server:
    """Holds some requests in flight, over a manager of ours. `from_list`: tokens come as Python lists, not arrays."""

    def __init__(self, config: CacheConfig, num_in_flight: int, *, from_list: bool = False) -> None:
        self._block_size, self._num_in_flight, self._from_list = config.block_size, num_in_flight, from_list
        self.cache = PrefixCacheManager(config)
        self._num_served = 0
        self.num_hit_tokens = 0
        self.nanoseconds = dict.fromkeys(PHASES, 0)

    def serve(self, works: Iterable[Work]) -> None:
        """See `Serving`."""
        serve_in_flight(works, self._num_in_flight, self._start, self._finish)

    def serve_by_token(self, works: Iterable[Work]) -> None:
        """The same, but a step gives each request in flight one token, as most engines do: all take it together."""
        waiting, live = iter(works), list[tuple[Request, deque[int]]]()
        while True:
            for work in islice(waiting, self._num_in_flight - len(live)):
                request, output = self._start(work)
                live.append((request, deque(output.tolist())))
            if not live:
                return
            sampled = [(request, [tokens.popleft()]) for request, tokens in live]
            started = thread_time_ns()
            take_step(self.cache, sampled)
            self.nanoseconds["decode"] += thread_time_ns() - started
            for request in [request for request, tokens in live if not tokens]:
                self._release(request)
            live = [(request, tokens) for request, tokens in live if tokens]

    def _start(self, work: Work) -> tuple[Request, Tokens]:
        cache, spent = self.cache, self.nanoseconds
        self._num_served += 1
        name, prompt = str(self._num_served), work.prompt.tolist() if self._from_list else work.prompt
        started = thread_time_ns()
        request = Request(request_id=name, prompt_token_ids=prompt)
        made = thread_time_ns()
        match = cache.match(request)
        matched = thread_time_ns()
        cache.allocate(request, -(-request.num_tokens // self._block_size) - len(match.block_ids))
        allocated = thread_time_ns()
        cache.commit(request, request.num_tokens)
        spent["commit"] += thread_time_ns() - allocated
        spent["allocate"] += allocated - matched
        spent["match"] += matched - made
        spent["request"] += made - started
        self.num_hit_tokens += match.num_tokens
        return request, work.output

    def _finish(self, live: tuple[Request, Tokens]) -> None:
        request, output = live
        pieces = [output[first : first + STEP_TOKENS] for first in range(0, len(output), STEP_TOKENS)]
        steps = [piece.tolist() if self._from_list else piece for piece in pieces]
        started = thread_time_ns()
        for tokens in steps:
            take_step(self.cache, [(request, tokens)])
        self.nanoseconds["decode"] += thread_time_ns() - started
        self._release(request)

    def _release(self, request: Request) -> None:
        started = thread_time_ns()
        self.cache.commit(request, request.num_tokens)
        committed = thread_time_ns()
        self.cache.release(request)
        self.nanoseconds["release"] += thread_time_ns() - committed
        self.nanoseconds["decode"] += committed - started


def take_step(cache: PrefixCacheManager, sampled: Iterable[tuple[Request, Sequence[int] | Tokens]]) -> None:
    """A step has computed all that these requests had, and has sampled these tokens of each.

    Raises:
        CacheError: what the cache answers of the first that it refuses; the pool is too small.
    """
    for done in cache.step([(request, tokens, request.num_tokens) for request, tokens in sampled]):
        if isinstance(done, BaseException):
            raise done


def serve_in_flight(
    works: Iterable[Work], num_in_flight: int, start: Callable[[Work], T], finish: Callable[[T], None]
) -> None:
    """Start each, and finish the oldest wherever so many are under way; in the end all."""
    live: deque[T] = deque()
    for work in works:
        live.append(start(work))
        if len(live) >= num_in_flight:
            finish(live.popleft())
    while live:
        finish(live.popleft())


def new_server(
    workload: Workload, policy: str = "lru", cpu_ratio: float = 0.0, *, from_list: bool = False, explains: bool = True
) -> Server:
    """A server over a fresh manager, with the pool that the workload asks for. Not `explains`: without the memory of
    what was missed and why, and without the flight recorder."""
    num_blocks = workload.pool_tokens // workload.block_size
    config = bench_config(workload.block_size, num_blocks, policy, cpu_ratio)
    if not explains:
        insight = InsightConfig(flight_recorder_bytes=0)
        config = dataclasses.replace(config, lost_blocks_bytes=0, num_explained_requests=0, insight=insight)
    return Server(config, workload.num_in_flight, from_list=from_list)


def bench_config(block_size: int, num_gpu_blocks: int, policy: str = "lru", cpu_ratio: float = 0.0) -> CacheConfig:
    """A manager without bytes, with `cpu_ratio` CPU blocks for each GPU block."""
    return CacheConfig(
        block_size=block_size,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=int(num_gpu_blocks * cpu_ratio),
        eviction_policy=policy,
        transfer_client="inline",
    )


def serve_workload(server: Serving, workload: Workload) -> dict[str, float]:
    """Serve the whole workload; microseconds per request by phase: see `times_of`."""
    gc.collect()  # what the server before has left is not this one's
    server.serve(workload.works)
    return times_of(server, workload)


def times_of(server: Serving, workload: Workload) -> dict[str, float]:
    """Microseconds per request by phase, of a server that has served the whole workload.

    `all` is what the manager's verbs take, decoding included; `request` is what the caller pays to pack its tokens.
    """
    found = {phase: spent / 1000 / len(workload.works) for phase, spent in server.nanoseconds.items()}
    num_tokens = sum(len(work.prompt) for work in workload.works)
    whole = sum(found.values())
    return {**found, "all": whole - found["request"], "whole": whole, "hit": server.num_hit_tokens / num_tokens}
