"""What could grow with the number of cached blocks: requests and evictions."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from time import thread_time_ns

import numpy as np

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_pool import BlockPool, Owner
from fastdeploy_cache.books.evicting import evict
from fastdeploy_cache.books.growing import insert
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Tier
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.bench.control import medians
from fastdeploy_cache.launch.bench.serving import Server, Serving, bench_config
from fastdeploy_cache.launch.bench.workloads import Scale
from fastdeploy_cache.policies import new_policy


class FullCache:
    """A pool full of cached sequences, and the stream of requests that goes on evicting."""

    def __init__(self, num_blocks: int, server: Serving | None = None) -> None:
        """Fill the empty pool of `server`, or that of a new manager of ours."""
        self._scale = Scale(num_blocks)
        self._server = server or full_server(num_blocks)
        self._server.serve(self._scale.fill())

    def serve(self, num_requests: int) -> float:
        """Microseconds per request."""
        works = self._scale.more(num_requests)
        before = sum(self._server.nanoseconds.values())
        self._server.serve(works)
        return (sum(self._server.nanoseconds.values()) - before) / 1000 / num_requests


def full_server(num_blocks: int, *, from_list: bool = False) -> Server:
    """A manager of ours for `FullCache`."""
    return Server(bench_config(Scale.block_size, num_blocks), Scale.num_in_flight, from_list=from_list)


def full_pool_costs(
    num_blocks: int, vllm: Callable[[int, int], float] | None, repeats: int = 5, num_requests: int = 200
) -> dict[str, float]:
    """Microseconds per request, packing included, by turns: from arrays, from lists, and what `vllm` answers of as many
    requests under a pool of that size."""
    caches = {
        "ours": FullCache(num_blocks),
        "from a list": FullCache(num_blocks, full_server(num_blocks, from_list=True)),
    }
    for cache in caches.values():
        cache.serve(num_requests // 2)
    times = []
    for _ in range(repeats):
        found = {name: cache.serve(num_requests) for name, cache in caches.items()}
        if vllm is not None:
            found["vLLM"] = vllm(num_blocks, num_requests)
        times.append(found)
    return medians(times)


def scale_ratio(small: int, large: int, pairs: int = 5, num_requests: int = 200) -> dict[str, float]:
    """Both managers in one process, alternating: microseconds per request, and the best ratio of the pairs."""
    caches = FullCache(small), FullCache(large)
    for cache in caches:
        cache.serve(num_requests // 2)
    times = [[cache.serve(num_requests) for cache in caches] for _ in range(pairs)]
    return {
        "small": statistics.median(pair[0] for pair in times),
        "large": statistics.median(pair[1] for pair in times),
        "ratio": min(pair[1] / pair[0] for pair in times),
    }


def eviction_cost(num_blocks: int, per_call: int, policy: str = "lru", num_calls: int = 640) -> float:
    """Microseconds per block: evicting from runs of 64, so many blocks a call."""
    num_calls = min(num_calls, num_blocks // per_call // 2)
    pool = BlockPool("GPU", num_blocks)
    tree = PrefixTree(
        Scale.block_size,
        (pool, BlockPool("CPU", 0)),
        new_policy(policy, lambda: 0.0, num_blocks=num_blocks, block_tokens=Scale.block_size),
        0,
        SYSTEM_CLOCK,
    )
    rng = np.random.default_rng(6)
    length = Scale.num_sequence_blocks
    for _ in range(num_blocks // length):
        tokens = rng.integers(0, 50_000, length * Scale.block_size, dtype=np.int32).tobytes()
        keys = BlockKeys(tokens, bytearray(), None)
        done = insert(tree, (tree.root(""), 0), keys, 0, pool.allocate(length, Owner.REQUEST))
        tree.move_pin(tree.move_pin(None, done.run, done.end), None, 0)
    spent: list[int] = []
    for _ in range(num_calls):
        started = thread_time_ns()
        evict(tree.residency, Tier.GPU, per_call)
        spent.append(thread_time_ns() - started)
        pool.allocate(per_call, Owner.REQUEST)
    # a call in 64 removes a run and costs more: means over such rounds, then the median of the rounds
    return statistics.median(_round_means(spent, 64)) / per_call / 1000


def _round_means(times: list[int], length: int) -> list[float]:
    return [statistics.mean(times[i : i + length]) for i in range(0, len(times), length)]
