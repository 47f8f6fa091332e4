"""Serve a workload through a manager, phase by phase, and the floors that it is compared with."""

from __future__ import annotations

import hashlib
import statistics
from collections import deque
from collections.abc import Iterable
from time import perf_counter_ns

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.launch.bench.workloads import Tokens, Work, Workload

PHASES = ("request", "match", "allocate", "commit", "decode", "release")
_STEP = 64  # output tokens for each decode step


class Server:
    """An engine that computes nothing: it holds some requests in flight and notes what each verb costs."""

    def __init__(
        self, block_size: int, num_gpu_blocks: int, num_in_flight: int, *, policy: str = "lru", num_cpu_blocks: int = 0
    ) -> None:
        self._config = CacheConfig(
            block_size=block_size,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            eviction_policy=policy,
            transfer_client="inline",
        )
        self.cache = PrefixCacheManager(self._config)
        self._num_in_flight = num_in_flight
        self._live: deque[tuple[Request, Tokens]] = deque()
        self._num_served = 0
        self.num_hit_tokens = 0
        self.nanoseconds = dict.fromkeys(PHASES, 0)

    def serve(self, works: Iterable[Work]) -> None:
        """Serve all of `works`, adding to `nanoseconds`."""
        for work in works:
            self._start(work)
            if len(self._live) >= self._num_in_flight:
                self._finish()
        while self._live:
            self._finish()

    def _start(self, work: Work) -> None:
        cache, size = self.cache, self._config.block_size
        self._num_served += 1
        clock = [perf_counter_ns()]
        request = Request(request_id=str(self._num_served), prompt_token_ids=work.prompt)
        clock.append(perf_counter_ns())
        match = cache.match(request)
        clock.append(perf_counter_ns())
        cache.allocate(request, -(-request.num_tokens // size) - len(match.block_ids))
        clock.append(perf_counter_ns())
        cache.commit(request, request.num_tokens)
        clock.append(perf_counter_ns())
        self.num_hit_tokens += match.num_tokens
        for phase, start, end in zip(PHASES[:4], clock[:-1], clock[1:], strict=True):
            self.nanoseconds[phase] += end - start
        self._live.append((request, work.output))

    def _finish(self) -> None:
        cache, size = self.cache, self._config.block_size
        request, output = self._live.popleft()
        started = perf_counter_ns()
        for first in range(0, len(output), _STEP):
            before = -(-request.num_tokens // size)
            request.append_output(output[first : first + _STEP])
            missing = -(-request.num_tokens // size) - before
            if missing:
                cache.allocate(request, missing)
            cache.commit(request, request.num_tokens)
        decoded = perf_counter_ns()
        cache.release(request)
        self.nanoseconds["release"] += perf_counter_ns() - decoded
        self.nanoseconds["decode"] += decoded - started


def serve_workload(workload: Workload, policy: str = "lru", cpu_ratio: float = 0.0) -> dict[str, float]:
    """A fresh manager over the whole workload; microseconds per request by phase.

    `all` is what the manager's verbs take, decoding included; `request` is what the caller pays to pack its tokens.
    """
    num_blocks = workload.pool_tokens // workload.block_size
    server = Server(
        workload.block_size,
        num_blocks,
        workload.num_in_flight,
        policy=policy,
        num_cpu_blocks=int(num_blocks * cpu_ratio),
    )
    server.serve(workload.works)
    found = {phase: spent / 1000 / len(workload.works) for phase, spent in server.nanoseconds.items()}
    num_tokens = sum(len(work.prompt) for work in workload.works)
    whole = sum(spent for phase, spent in found.items() if phase != "request")  # packing the prompt is the caller's
    return {**found, "all": whole, "hit": server.num_hit_tokens / num_tokens}


def chain_floor(tokens: Tokens, block_size: int) -> list[bytes]:
    """A SHA-256 chain over the blocks of a prompt: what a cache pays that names blocks before it looks for them."""
    parent, names, data, step = b"", [], tokens.tobytes(), block_size * 4
    for start in range(0, len(data) - step + 1, step):
        parent = hashlib.sha256(parent + data[start : start + step]).digest()
        names.append(parent)
    return names


def floors(workload: Workload) -> dict[str, float]:
    """Microseconds per request for the same prompts: SHA-256 chain, NumPy compare, walk through a dict of names."""
    spent = {"chain": 0, "compare": 0, "dict walk": 0}
    for work in workload.works:
        copy = work.prompt.copy()
        started = perf_counter_ns()
        names = chain_floor(work.prompt, workload.block_size)
        chained = perf_counter_ns()
        equal = bool((work.prompt == copy).all())
        compared = perf_counter_ns()
        known = dict.fromkeys(names, 1)
        prepared = perf_counter_ns()
        found = sum([known[name] for name in names])
        walked = perf_counter_ns()
        assert equal and found == len(names)
        spent["chain"] += chained - started
        spent["compare"] += compared - chained
        spent["dict walk"] += walked - prepared
    return {name: total / 1000 / len(workload.works) for name, total in spent.items()}


def medians(repeats: list[dict[str, float]]) -> dict[str, float]:
    """Name by name."""
    return {name: statistics.median(repeat[name] for repeat in repeats) for name in repeats[0]}


def match_over_edges(num_edges: int, block_size: int = 64, repeats: int = 41) -> dict[str, float]:
    """Match of a cached 128k-token prompt whose path has so many edges, and the bare NumPy compare; microseconds."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 50_000, 131_072, dtype=np.int32)
    server = Server(block_size, 10_000, 1)
    num_blocks = len(prompt) // block_size
    works = []
    for edge in range(1, num_edges):  # a prompt that parts there, so that the path has a border
        cut = num_blocks * edge // num_edges * block_size
        works.append(np.concatenate([prompt[:cut], rng.integers(0, 50_000, block_size, dtype=np.int32)]))
    server.serve(Work(tokens, prompt[:0]) for tokens in (*works, prompt))
    copy = prompt.copy()
    spent: dict[str, list[int]] = {"match": [], "compare": []}
    for i in range(repeats):
        request = Request(request_id=f"again {i}", prompt_token_ids=prompt)
        started = perf_counter_ns()
        match = server.cache.match(request)
        matched = perf_counter_ns()
        equal = bool((prompt == copy).all())
        compared = perf_counter_ns()
        assert equal and match.num_tokens == len(prompt) - block_size
        server.cache.release(request)
        spent["match"].append(matched - started)
        spent["compare"].append(compared - matched)
    return {name: statistics.median(times) / 1000 for name, times in spent.items()}
