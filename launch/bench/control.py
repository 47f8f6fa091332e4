"""The floors that a served workload is compared with, and the match of a prompt over many runs."""

from __future__ import annotations

import gc
import hashlib
import statistics
from time import thread_time_ns

import numpy as np

from fastdeploy_cache import Request
from fastdeploy_cache.launch.bench.serving import Server, bench_config, new_server, times_of
from fastdeploy_cache.launch.bench.workloads import Tokens, Work, Workload


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
        started = thread_time_ns()
        names = chain_floor(work.prompt, workload.block_size)
        chained = thread_time_ns()
        equal = bool((work.prompt == copy).all())
        compared = thread_time_ns()
        known = dict.fromkeys(names, 1)
        prepared = thread_time_ns()
        found = sum([known[name] for name in names])
        walked = thread_time_ns()
        assert equal and found == len(names)
        spent["chain"] += chained - started
        spent["compare"] += compared - chained
        spent["dict walk"] += walked - prepared
    return {name: total / 1000 / len(workload.works) for name, total in spent.items()}


def by_token(workload: Workload, repeats: int) -> dict[str, dict[str, float]]:
    """Microseconds per request, one token a step: with causes and flight recorder, and without; interleaved. The least
    of the repeats of each, as what they differ by is less than the noise of a run."""
    runs: dict[str, list[dict[str, float]]] = {"lru": [], "lru, no causes": []}
    for _ in range(repeats):
        for name, times in runs.items():
            server = new_server(workload, explains=name == "lru")
            gc.collect()  # what the server before has left is not this one's
            server.serve_by_token(workload.works)
            times.append(times_of(server, workload))
    return {name: min(times, key=lambda each: each["whole"]) for name, times in runs.items()}


def medians(repeats: list[dict[str, float]]) -> dict[str, float]:
    """Name by name."""
    return {name: statistics.median(repeat[name] for repeat in repeats) for name in repeats[0]}


def match_over_edges(num_edges: int, block_size: int = 64, repeats: int = 41) -> dict[str, float]:
    """Match of a cached 128k-token prompt whose path has so many edges, and the bare NumPy compare; microseconds."""
    rng = np.random.default_rng(5)
    prompt = rng.integers(0, 50_000, 131_072, dtype=np.int32)
    server = Server(bench_config(block_size, 10_000), 1)
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
        started = thread_time_ns()
        match = server.cache.match(request)
        matched = thread_time_ns()
        equal = bool((prompt == copy).all())
        compared = thread_time_ns()
        assert equal and match.num_tokens == len(prompt) - block_size
        server.cache.release(request)
        spent["match"].append(matched - started)
        spent["compare"].append(compared - matched)
    return {name: statistics.median(times) / 1000 for name, times in spent.items()}
