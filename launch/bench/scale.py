"""What grows with the number of cached blocks: requests, evictions, bytes."""

from __future__ import annotations

import heapq
import json
import statistics
import subprocess
import sys
from time import perf_counter_ns

import numpy as np

from fastdeploy_cache.books.block_pool import BlockPool, Owner
from fastdeploy_cache.books.prefix_tree import BlockKeys, PrefixTree
from fastdeploy_cache.books.run import Tier
from fastdeploy_cache.launch.bench.control import Server
from fastdeploy_cache.launch.bench.workloads import Scale
from fastdeploy_cache.policies import new_policy

_IN_FLIGHT = 4


class FullCache:
    """A manager whose pool is full of cached sequences, and the stream of requests that goes on evicting."""

    def __init__(self, num_blocks: int, policy: str = "lru", cpu_ratio: float = 0.0) -> None:
        self._scale = Scale(num_blocks)
        self._server = Server(
            Scale.block_size, num_blocks, _IN_FLIGHT, policy=policy, num_cpu_blocks=int(num_blocks * cpu_ratio)
        )
        self._server.serve(self._scale.fill())
        self.cache = self._server.cache

    def serve(self, num_requests: int) -> float:
        """Microseconds per request."""
        works = self._scale.more(num_requests)
        before = sum(self._server.nanoseconds.values())
        self._server.serve(works)
        return (sum(self._server.nanoseconds.values()) - before) / 1000 / num_requests


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


def eviction_cost(num_blocks: int, per_call: int, policy: str = "lru", num_calls: int = 640) -> dict[str, float]:
    """Microseconds per block: evicting from runs of 64, so many blocks a call, and the heap pushes it includes."""
    num_calls = min(num_calls, num_blocks // per_call // 2)
    pool = BlockPool("GPU", num_blocks)
    tree = PrefixTree(
        Scale.block_size,
        (pool, BlockPool("CPU", 0)),
        new_policy(policy, lambda: 0.0, num_blocks=num_blocks, block_tokens=Scale.block_size),
    )
    rng = np.random.default_rng(6)
    length = Scale.num_sequence_blocks
    for _ in range(num_blocks // length):
        keys = BlockKeys(bytearray(rng.integers(0, 50_000, length * Scale.block_size, dtype=np.int32)), None)
        done = tree.insert((tree.root(""), 0), keys, 0, pool.allocate(length, Owner.REQUEST))
        tree.move_pin(tree.move_pin(None, done.run, done.end), None, 0)
    spent: dict[str, list[int]] = {"evict": [], "push": []}
    for _ in range(num_calls):
        started = perf_counter_ns()
        tree.residency.evict(Tier.GPU, per_call)
        evicted = perf_counter_ns()
        ids, heap = pool.allocate(per_call, Owner.REQUEST), list[int]()
        before_push = perf_counter_ns()
        for block_id in ids:
            heapq.heappush(heap, block_id)
        spent["push"].append(perf_counter_ns() - before_push)
        spent["evict"].append(evicted - started)
    # a call in 64 removes a run and costs more: means over such rounds, then the median of the rounds
    found = {name: statistics.median(_round_means(times, 64)) / per_call / 1000 for name, times in spent.items()}
    return {**found, "over the push": found["evict"] - found["push"]}


def _round_means(times: list[int], length: int) -> list[float]:
    return [statistics.mean(times[i : i + length]) for i in range(0, len(times), length)]


def bytes_per_block(num_blocks: int, policy: str = "lru") -> float:
    """Growth of a fresh process by a manager with so many cached blocks, in runs of 64, for each block."""
    command = [sys.executable, "-P", "-m", "fastdeploy_cache.launch.bench.scale", str(num_blocks), policy]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    return float(json.loads(answer.stdout))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


def _measure_growth(num_blocks: int, policy: str) -> float:
    FullCache(6400, policy)  # what every cache needs once is not counted
    before = _resident_bytes()
    cache = FullCache(num_blocks, policy)
    grown = _resident_bytes() - before
    assert cache is not None
    return grown / num_blocks


if __name__ == "__main__":
    print(json.dumps(_measure_growth(int(sys.argv[1]), sys.argv[2])))
