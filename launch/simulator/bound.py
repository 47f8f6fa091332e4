"""What no policy can exceed: the clairvoyant cache, and the one that never evicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.policies.eviction import LeastRecentlyUsed
from fastdeploy_cache.request import Request
from fastdeploy_cache.run import Run, Tier
from launch.simulator.trace import Trace, TraceRequest

_NEVER = np.iinfo(np.int64).max


class Clairvoyant(LeastRecentlyUsed):
    """Evicts the leaf block whose next use is farthest (Belady's rule on a tree; needs blocks of one token)."""

    def __init__(self, trace: Trace) -> None:
        super().__init__(lambda: 0.0)
        self._next_use = np.full(trace.num_distinct_ids, _NEVER)  # by block
        self._uses_after = _uses_after(trace)

    def hear(self, number: int, request: TraceRequest) -> None:
        """Request `number` comes: the next use of its blocks is a later one."""
        self._next_use[request.blocks] = self._uses_after[number]

    def use(self, path: Sequence[Run], request: Request, num_hit_blocks: int) -> None:
        """What is used is known beforehand."""

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:  # noqa: ARG002
        return super().victim(tier, 1)  # the block before it may be needed earlier

    def rank(self, run: Run) -> Any:
        tail = int.from_bytes(run.tokens[(run.num_gpu - 1) * 4 : run.num_gpu * 4], "little")
        return -self._next_use[tail]


def _uses_after(trace: Trace) -> list[np.ndarray[Any, np.dtype[np.int64]]]:
    """By request: for each of its blocks, the number of the next request that has it."""
    following = np.full(trace.num_distinct_ids, _NEVER)
    uses = []
    for number in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[number].blocks
        uses.append(following[blocks])
        following[blocks] = number
    return uses[::-1]


def infinite_hit_rate(trace: Trace) -> float:
    """The token hit rate of a cache that never evicts."""
    seen = np.zeros(trace.num_distinct_ids, bool)
    num_hits = 0
    for request in trace.requests:
        num_hits += int(seen[request.blocks].sum())
        seen[request.blocks] = True
    return num_hits * trace.block_size / trace.num_tokens
