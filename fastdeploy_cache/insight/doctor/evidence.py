"""What the doctor goes by, wherever it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.insight.doctor.parted_prompts import parted_prompts
from fastdeploy_cache.insight.doctor.process_troubles import ProcessTrouble, troubles_of
from fastdeploy_cache.insight.what_if.what_if import WhatIfRate
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.requests.explanation import Explanation, Miss
from fastdeploy_cache.stats import CacheStats, StorageTierStats

_COPIED_BYTES, _NUM_COPIES = 32 * 2**20, 3


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """Requests that were served, what they missed, and the state of things.

    Attributes:
        num_requests: that were admitted. num_tokens: of their prompts.
        misses: what these requests have missed, in any number of parts.
        block_size: tokens of a block. policy: of eviction.
        num_gpu_blocks, num_cpu_blocks: sizes of the pools.
        troubles: processes that are not there, and why.
        num_full_disks: ranks whose store has no room.
        broken_operations: of storage, `read` and `write`, that are left alone as they fail.
        rates: of other sizes, where they are estimated.
        num_looked_prompts: that are or were cached and of which some blocks were compared: those from where they part
            from others. num_alike_prompts: of these, those that go on behind another block as others do.
        parted_at_block: the place of the block in which they part; None: not known, as they are cached no more.
        load_bytes_per_second: of a rank, from the CPU tier; None: not known.
        copy_bytes_per_second: of a plain copy on this machine; None: not measured.
        storage: the store, as the cache sees it; None where there is none, or where that is not known.
        min_prefetch_tokens, storage_write_policy: see `CacheConfig`.
        num_resets: since the start.
        num_cached_blocks: now, in both tiers. num_unpublished_requests: that have gone without a commit, and without a
            hit, so far.
    """

    num_requests: int
    num_tokens: int
    misses: Sequence[Miss]
    block_size: int
    policy: str
    num_gpu_blocks: int
    num_cpu_blocks: int
    troubles: Sequence[ProcessTrouble] = ()
    num_full_disks: int = 0
    broken_operations: Sequence[str] = ()
    rates: Sequence[WhatIfRate] = ()
    num_looked_prompts: int = 0
    num_alike_prompts: int = 0
    parted_at_block: int | None = 0
    load_bytes_per_second: float | None = None
    copy_bytes_per_second: float | None = None
    storage: StorageTierStats | None = None
    min_prefetch_tokens: int = 0
    storage_write_policy: str = ""
    num_resets: int = 0
    num_cached_blocks: int = 0
    num_unpublished_requests: int = 0

    def misses_for(self, *causes: Cause) -> list[Miss]:
        """Those of these causes."""
        return [miss for miss in self.misses if miss.cause in causes]

    def share(self, misses: Sequence[Miss]) -> float:
        """Their share of all prompt tokens."""
        return sum(miss.num_tokens for miss in misses) / self.num_tokens if self.num_tokens else 0.0


def evidence_of(
    config: CacheConfig,
    stats: CacheStats,
    requests: Sequence[Explanation],
    books: Books,
    *,
    rates: Sequence[WhatIfRate] = (),
    load_bytes_per_second: float | None = None,
    num_unpublished_requests: int = 0,
) -> Evidence:
    """What a running cache shows. `requests`: the last ones. Takes the lock for a look at some prompts, and copies some
    memory where loads are refused."""
    storage = stats.storage
    states = {"read": storage.reading, "write": storage.writing} if storage is not None else {}
    parted = parted_prompts(books)
    case = evidence_of_requests(config, requests)
    is_slow = bool(case.misses_for(Cause.SLOWER))
    return replace(
        case,
        troubles=troubles_of(stats.processes),
        num_full_disks=storage.num_full_disks if storage is not None else 0,
        broken_operations=[name for name, state in states.items() if state is BreakerState.OPEN],
        rates=rates,
        num_looked_prompts=parted.num_looked,
        num_alike_prompts=parted.num_alike,
        parted_at_block=parted.block,
        load_bytes_per_second=load_bytes_per_second,
        copy_bytes_per_second=_plain_copy() if is_slow and config.block_bytes() else None,
        storage=storage,
        num_resets=stats.epoch,
        num_cached_blocks=stats.gpu.num_cached + stats.cpu.num_cached,
        num_unpublished_requests=num_unpublished_requests,
    )


def evidence_of_requests(config: CacheConfig, requests: Sequence[Explanation]) -> Evidence:
    """What a configuration and some requests show by themselves."""
    gpu, cpu = config.pool_sizes()
    return Evidence(
        num_requests=len(requests),
        num_tokens=sum(each.num_tokens for each in requests),
        misses=[miss for each in requests for miss in each.misses],
        block_size=config.block_size,
        policy=config.eviction_policy,
        num_gpu_blocks=gpu,
        num_cpu_blocks=cpu,
        min_prefetch_tokens=config.min_prefetch_tokens,
        storage_write_policy=config.storage_write_policy,
    )


def _plain_copy() -> float:
    """Bytes that one thread copies in a second: the best of a few copies, some milliseconds each."""
    source, target = np.ones(_COPIED_BYTES, np.uint8), np.zeros(_COPIED_BYTES, np.uint8)
    best = float("inf")
    for _ in range(_NUM_COPIES):
        started = SYSTEM_CLOCK.now()
        target[:] = source
        best = min(best, SYSTEM_CLOCK.now() - started)
    return _COPIED_BYTES / best
