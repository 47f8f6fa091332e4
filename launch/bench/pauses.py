"""The worst call of each verb beside the mean: what an engine's step may have to wait for under the one lock."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from time import thread_time_ns
from typing import NamedTuple, TypeVar

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, Request
from fastdeploy_cache.launch.bench.workloads import Tokens

VERBS = ("match", "allocate", "commit", "release", "first eviction")
LOCK = "lock held"
_BLOCK_SIZE = 16
T = TypeVar("T")


class _TimedLock:
    """A lock that notes how long each holder has it, in nanoseconds of its thread's time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held: list[int] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """See `threading.Lock`."""
        is_taken = self._lock.acquire(blocking, timeout)
        self._since = thread_time_ns()
        return is_taken

    def release(self) -> None:
        """See `threading.Lock`."""
        self.held.append(thread_time_ns() - self._since)
        self._lock.release()


class Pool(NamedTuple):
    """A pool to be filled with prompts of so many blocks each, and a CPU tier of so many blocks for each GPU block."""

    name: str
    num_blocks: int
    blocks_per_prompt: int
    cpu_ratio: float = 0.0
    policy: str = "lru"


def pools_of(num_blocks: int) -> list[Pool]:
    """The pools to measure where the largest has so many blocks; those of short prompts have more runs for each."""
    return [
        Pool("64 blocks", num_blocks, 64),
        Pool("4 blocks", num_blocks // 5, 4),
        Pool("1 block", num_blocks // 5, 1),
        Pool("64 blocks with a CPU tier", num_blocks, 64, 2.0),
        Pool("4 blocks with a CPU tier", num_blocks // 5, 4, 2.0),
    ]


def pauses(pool: Pool, num_more: int = 2000) -> dict[str, dict[str, float]]:
    """Fill a pool, use half of what is in it once more, and go on: by verb, the mean and the worst call, in
    microseconds of thread time; also of the first call that evicts, and of the one lock.

    The garbage collector is off meanwhile: its pauses are not the verbs'. Without rank processes a copy ends within the
    verb that started it, so with a CPU tier a verb pays for all copies that follow from it; what holds the lock, and
    so what another thread waits for, is one step of these.
    """
    spent: dict[str, list[int]] = {verb: [] for verb in VERBS}
    num_cpu_blocks = int(pool.num_blocks * pool.cpu_ratio)
    config = CacheConfig(
        block_size=_BLOCK_SIZE,
        num_gpu_blocks=pool.num_blocks,
        num_cpu_blocks=num_cpu_blocks,
        eviction_policy=pool.policy,
        transfer_client="inline",
        load_policy="always",
    )

    def timed(verb: str, call: Callable[[], T]) -> T:
        started = thread_time_ns()
        result = call()
        spent[verb].append(thread_time_ns() - started)
        return result

    cache, lock = PrefixCacheManager(config), _TimedLock()
    cache._books._lock = lock  # type: ignore[assignment]  # noqa: SLF001 (nothing outside tells how long it is held)
    gc.collect()
    gc.disable()
    for number, tokens in enumerate(_prompts(pool, num_more)):
        request = Request(request_id=str(number), prompt_token_ids=tokens)
        match = timed("match", lambda request=request: cache.match(request))  # type: ignore[misc]
        num_tokens = len(tokens)
        num_missing = -(-num_tokens // _BLOCK_SIZE) - len(match.block_ids)
        is_first = not spent["first eviction"] and cache.blocks.view.tier_stats().num_free < num_missing
        verb = "first eviction" if is_first else "allocate"
        timed(verb, lambda request=request, n=num_missing: cache.allocate(request, n))  # type: ignore[misc]
        timed("commit", lambda request=request, n=num_tokens: cache.commit(request, n))  # type: ignore[misc]
        timed("release", lambda request=request: cache.release(request))  # type: ignore[misc]
    gc.enable()
    cache.close()
    spent[LOCK] = lock.held
    return {verb: {"mean": sum(times) / len(times) / 1000, "worst": max(times) / 1000} for verb, times in spent.items()}


def _prompts(pool: Pool, num_more: int) -> Iterator[Tokens]:
    """Distinct prompts, as many as fill the pool, each once and again, and then new ones."""
    num_prompts = pool.num_blocks // pool.blocks_per_prompt - 1
    num_tokens = pool.blocks_per_prompt * _BLOCK_SIZE
    block = np.arange(num_tokens, dtype=np.int32) % 50_000

    def prompt(number: int) -> Tokens:
        tokens = block.copy()
        tokens[:2] = number % 50_000, number // 50_000
        return tokens

    half = num_prompts // 2
    for number in range(num_prompts):
        yield prompt(number)
    for number in range(half):
        yield prompt(number)
    for number in range(num_prompts, num_prompts + num_more):
        yield prompt(number)
