"""What the process that estimates other sizes is told, and where it writes what it finds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.shared_array import SharedArray

FACTORS = (0.5, 1.0, 2.0, 4.0)  # of a tier's size
_COMPARED_WITH = "lru"
_SAMPLED_BLOCKS = 1024  # of the GPU pool: fewer blur the rates, more cost processor time
_MAX_SAMPLED_BLOCKS = 16384  # of a larger tier
_HEADER_WORDS = 5  # of eight bytes: changes, requests, those of the window, their tokens, those used before


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A cache that there might be; sizes in blocks."""

    tier: str  # whose size differs: gpu or cpu
    factor: float
    policy: str
    num_gpu_blocks: int
    num_cpu_blocks: int


class WhatIfSetup(msgspec.Struct, frozen=True, kw_only=True):
    """All that the process needs to know. `sample_ratio`: the share of all blocks that it looks at, 0 to 1."""

    block_size: int
    sample_ratio: float
    cpu_write_policy: str
    cpu_write_high_water: float
    cpu_write_min_uses: int
    window_seconds: float
    plans: tuple[Plan, ...]
    engine_pid: int
    result_fd: int  # of the memory for results


def reason_for_none(config: CacheConfig) -> str | None:
    """Why nothing is estimated for this configuration; None: it is."""
    if not config.insight.what_if:
        return "insight.what_if is off"
    if not config.enable_prefix_caching:
        return "enable_prefix_caching is off"
    if config.layout is not None and config.layout.groups:
        return "what a model keeps in rows beside its full KV is not estimated"
    return None


def plans_for(config: CacheConfig) -> tuple[Plan, ...]:
    """Every tier of this configuration at each factor, under its own policy and under `lru`.

    Where there is no CPU tier, the factors are of the GPU pool's size: what one of that size would give.
    """
    gpu, cpu = config.pool_sizes()
    plans = []
    for policy in dict.fromkeys((config.eviction_policy, _COMPARED_WITH)):
        for tier, size in (("gpu", gpu), ("cpu", cpu or gpu)):
            for factor in FACTORS:
                wanted = max(1, round(size * factor))
                sizes = (wanted, cpu) if tier == "gpu" else (gpu, wanted)
                plans.append(
                    Plan(tier=tier, factor=factor, policy=policy, num_gpu_blocks=sizes[0], num_cpu_blocks=sizes[1])
                )
    return tuple(plans)


def setup_for(config: CacheConfig, window_seconds: float, result_fd: int = -1) -> WhatIfSetup:
    """What the process is told of this configuration."""
    sizes = config.pool_sizes()
    return WhatIfSetup(
        block_size=config.block_size,
        sample_ratio=min(1.0, _SAMPLED_BLOCKS / sizes[0], _MAX_SAMPLED_BLOCKS / max(sizes)),
        cpu_write_policy=config.cpu_write_policy,
        cpu_write_high_water=config.cpu_write_high_water,
        cpu_write_min_uses=config.cpu_write_min_uses,
        window_seconds=window_seconds,
        plans=plans_for(config),
        engine_pid=os.getpid(),
        result_fd=result_fd,
    )


@dataclass(frozen=True, kw_only=True)
class WhatIfResult:
    """Tokens of the requests of the window, and how many of them each plan would have hit."""

    num_requests: int  # since the start
    num_window_requests: int
    num_window_tokens: int
    seen_tokens: int  # of these, in blocks that were used before: no cache hits more
    hit_tokens: tuple[float, ...]  # in the window, by plan


class ResultBoard:
    """Results in shared memory: one process writes, another reads, neither waits.

    The first word is odd while the others change. A reader that saw it odd, or changed, looks again.
    """

    def __init__(self, array: SharedArray, num_plans: int) -> None:
        self._words: np.ndarray[Any, np.dtype[np.float64]] = array.view(np.float64, (self.num_words(num_plans),))

    @staticmethod
    def num_words(num_plans: int) -> int:
        """How many words of eight bytes it takes for so many plans."""
        return _HEADER_WORDS + num_plans

    def write(self, result: WhatIfResult) -> None:
        """Show what was found. One thread of one process does this."""
        words = self._words
        words[0] += 1
        words[1:_HEADER_WORDS] = (
            result.num_requests,
            result.num_window_requests,
            result.num_window_tokens,
            result.seen_tokens,
        )
        words[_HEADER_WORDS:] = result.hit_tokens
        words[0] += 1

    def read(self) -> WhatIfResult | None:
        """What was written last; None where it was being written at each of several looks. Any thread."""
        for _ in range(100):
            words = self._words.copy()
            if words[0] % 2 == 0 and words[0] == self._words[0]:
                num_requests, num_window_requests, num_window_tokens, seen = (int(n) for n in words[1:_HEADER_WORDS])
                return WhatIfResult(
                    num_requests=num_requests,
                    num_window_requests=num_window_requests,
                    num_window_tokens=num_window_tokens,
                    seen_tokens=seen,
                    hit_tokens=tuple(words[_HEADER_WORDS:].tolist()),
                )
        return None
