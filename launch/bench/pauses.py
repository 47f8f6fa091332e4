"""The worst call of each verb beside the mean: what an engine's step may have to wait for under the one lock.

Each pool is measured in a fresh process, which also tells what a cached block costs in memory.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

import numpy as np

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.launch.bench.serving import bench_config, take_step
from fastdeploy_cache.launch.bench.verb_times import Collections, Stopwatch, TimedLock
from fastdeploy_cache.launch.bench.workloads import Tokens
from fastdeploy_cache.launch.interrupts import kept_from_children

VERBS = ("match", "allocate", "commit", "step", "release", "first eviction", "scrape")
RESET = "reset"
LOCK, COLLECTION = "lock held", "collection"
_BLOCK_SIZE = 16
_LONG_BLOCKS = 8192  # of the long prompts, each of which takes the room of very many short ones
_MAX_MORE = 2000  # requests that evict
_STEP_EVERY = 4  # of these requests: the block that it takes is free for the next one's `allocate`
_NUM_SCRAPES = 20
_MAX_SECONDS = 1800
T = TypeVar("T")


class Pool(NamedTuple):
    """A pool to be filled with prompts of so many blocks each, and a CPU tier of so many blocks for each GPU block."""

    num_blocks: int
    blocks_per_prompt: int
    cpu_ratio: float = 0.0
    policy: str = "lru"

    @property
    def name(self) -> str:
        """Everything but the size."""
        more = (" with a CPU tier" if self.cpu_ratio else "") + (f", {self.policy}" if self.policy != "lru" else "")
        return f"{self.blocks_per_prompt} block{'s' * (self.blocks_per_prompt > 1)}{more}"

    @property
    def num_runs(self) -> int:
        """How many prompts fill it."""
        return self.num_blocks // self.blocks_per_prompt


def pools_of(sizes: Sequence[int], max_runs: int) -> tuple[list[Pool], list[Pool]]:
    """The pools to measure, and those left out because they have more runs than that: they take long."""
    wanted = [Pool(size, length) for length in (64, 4, 1) for size in sizes]
    wanted += [Pool(sizes[-1], 64, 2.0), Pool(sizes[-2:][0], 4, 2.0)]
    wanted += [Pool(sizes[-1], 64, policy="reuse"), Pool(sizes[-2:][0], 4, policy="reuse")]
    return [pool for pool in wanted if pool.num_runs <= max_runs], [p for p in wanted if p.num_runs > max_runs]


class PoolFigures(NamedTuple):
    """What was found: milliseconds by verb and kind, and bytes for each block."""

    times: dict[str, dict[str, float]]
    bytes_per_block: float


def pauses_apart(pool: Pool) -> PoolFigures:
    """What `pauses` finds in a fresh process."""
    command = [sys.executable, "-P", "-m", "fastdeploy_cache.launch.bench.pauses", json.dumps(pool)]
    with kept_from_children():
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with process:
        try:
            answer, _ = process.communicate(timeout=_MAX_SECONDS)
        finally:
            process.kill()  # where it has not ended
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return PoolFigures(*json.loads(answer))


def pauses(pool: Pool) -> PoolFigures:
    """Fill a pool, use half of what is in it once more, go on, reset it, and go on.

    Mean and 99th percentile are of the calls after that half, the worst is of all. Without rank processes a copy ends
    within the verb that started it, so with a CPU tier a verb pays for all copies that follow from it; what holds the
    lock, and so what another thread waits for, is one step of these.
    """
    num_more = min(_MAX_MORE, 20 * pool.num_runs)
    _Engine(Pool(1280, *pool[1:]), Collections()).fill()  # what every cache needs once
    gc.collect()
    gc.freeze()  # as engines do when they have started: what is collected below is the cache's
    with Collections() as collections:
        before = _resident_bytes()
        engine = _Engine(pool, collections)
        engine.fill()
        grown = _resident_bytes() - before
        engine.use_half_again()
        engine.go_on(num_more)
        engine.reset()
        engine.go_on(num_more)
        engine.cache.close()
    found = {verb: times.found() for verb, times in (*engine.watch.verbs.items(), (COLLECTION, collections.times))}
    return PoolFigures({verb: times for verb, times in found.items() if times}, grown / pool.num_blocks)


class _Engine:
    """A manager, and prompts that differ in their first block, each told by its number."""

    def __init__(self, pool: Pool, collections: Collections) -> None:
        self._pool = pool
        self.watch = Stopwatch(collections)
        self.cache = PrefixCacheManager(bench_config(_BLOCK_SIZE, pool.num_blocks, pool.policy, pool.cpu_ratio))
        self._books = books = self.cache._books  # noqa: SLF001 (nothing outside tells what is free in no time)
        self._lock = TimedLock(collections) if pool.cpu_ratio else None
        if self._lock is not None:
            books._lock = self._lock  # type: ignore[assignment]  # noqa: SLF001 (nor how long it is held)
        self._tokens = np.arange(_LONG_BLOCKS * _BLOCK_SIZE, dtype=np.int32) % 50_000
        self._num_prompts = 0  # so far
        self._num_moved = 0
        list(self.cache.metrics.collect())  # loads the library of metrics, as `serve_metrics` does before any scrape

    def fill(self) -> None:
        """Serve as many prompts as fit, but for one."""
        for _ in range(self._pool.num_runs - 1):
            self._serve_next(self._pool.blocks_per_prompt)

    def use_half_again(self) -> None:
        """Serve the younger half of the prompts once more."""
        for number in range(self._num_prompts - self._pool.num_runs // 2, self._num_prompts):
            self._serve(self._prompt(number, self._pool.blocks_per_prompt))

    def go_on(self, num_requests: int) -> None:
        """Serve new prompts that evict, then two long ones; and let a scrape look in."""
        self.watch.is_kept = True
        for _ in range(num_requests):
            self._serve_next(self._pool.blocks_per_prompt)
        self.watch.is_kept = False
        for _ in range(2):
            self._serve_next(min(_LONG_BLOCKS, self._pool.num_blocks // 4))
        self.watch.is_kept = True
        for _ in range(_NUM_SCRAPES):
            self._timed("scrape", lambda: list(self.cache.metrics.collect()))

    def reset(self) -> None:
        """Forget it all."""
        self._timed(RESET, self.cache.reset)

    def _serve_next(self, num_blocks: int) -> None:
        self._serve(self._prompt(self._num_prompts, num_blocks))
        self._num_prompts += 1

    def _prompt(self, number: int, num_blocks: int) -> Tokens:
        tokens = self._tokens[: num_blocks * _BLOCK_SIZE].copy()
        tokens[:2] = number % 50_000, number // 50_000
        return tokens

    def _serve(self, tokens: Tokens) -> None:
        cache = self.cache
        request = Request(request_id="a", prompt_token_ids=tokens)
        match = self._timed("match", lambda: cache.match(request))
        num_missing = len(tokens) // _BLOCK_SIZE - len(match.block_ids)
        num_free = self._books.pools[0].num_free
        num_taken = num_missing + max(0, num_missing - num_free)  # and evicted
        is_first = num_free < num_missing and "first eviction" not in self.watch.verbs
        verb = "first eviction" if is_first else "allocate"
        self._timed(verb, lambda: cache.allocate(request, num_missing), num_taken)
        self._timed("commit", lambda: cache.commit(request, len(tokens)), num_missing)
        if self.watch.is_kept and "first eviction" in self.watch.verbs and self._num_prompts % _STEP_EVERY == 0:
            num_taken = 1 if self._books.pools[0].num_free else 2
            self._timed("step", lambda: take_step(cache, [(request, [1])]), num_taken)
        self._timed("release", lambda: cache.release(request))

    def _timed(self, verb: str, call: Callable[[], T], num_blocks: int = 0) -> T:
        """Note the call, and how many blocks it has taken, evicted or published."""
        self.watch.start()
        result = call()
        nanoseconds = self.watch.stop()
        if self._lock is not None:
            num_blocks = max(num_blocks, self._take_moved())
            held = self._lock.take_longest()
            if verb != RESET:  # has a bound of its own
                self.watch.note(LOCK, held, num_blocks)
        self.watch.note(verb, nanoseconds, num_blocks)
        return result

    def _take_moved(self) -> int:
        """How many blocks of both tiers have been taken and evicted since the last call of this."""
        before = self._num_moved
        evicted = sum(map(sum, self._books.residency.ages.num_evicted))
        self._num_moved = 2 * evicted - sum(pool.num_free for pool in self._books.pools)
        return self._num_moved - before


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * 4096


if __name__ == "__main__":
    print(json.dumps(pauses(Pool(*json.loads(sys.argv[1])))))
