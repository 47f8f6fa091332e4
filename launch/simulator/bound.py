"""What no policy can exceed: the clairvoyant cache, and the one that never evicts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.books.leaves.policy import Asked, Hints, LeastRecentlyUsed
from fastdeploy_cache.books.run import Run, Tier
from fastdeploy_cache.launch.simulator.trace import Trace, TraceRequest

_NEVER = np.iinfo(np.int64).max


class Clairvoyant(LeastRecentlyUsed):
    """Evicts the leaf block whose next use is farthest (Belady's rule on a tree; needs blocks of one token)."""

    def __init__(self, trace: Trace, num_blocks: int) -> None:
        super().__init__(lambda: 0.0)
        self._next_use = np.full(trace.num_distinct_ids, _NEVER)  # by block
        self._uses_after = _uses_after(trace, num_blocks)

    def hear(self, number: int, request: TraceRequest) -> None:
        """Request `number` comes: the next use of its blocks is a later one."""
        uses = self._uses_after[number]
        if uses is not None:
            self._next_use[request.blocks] = uses

    def use(self, path: Sequence[Run], request: Hints, asked: Asked) -> None:
        """What is used is known beforehand."""

    def victim(self, tier: Tier, num_blocks: int) -> tuple[Run, int]:  # noqa: ARG002
        return super().victim(tier, 1)  # the block before it may be needed earlier

    def rank(self, run: Run) -> Any:
        tail = int.from_bytes(run.tokens[(run.num_gpu - 1) * 4 : run.num_gpu * 4], "little")
        return -self._next_use[tail]


def _uses_after(trace: Trace, num_blocks: int) -> list[np.ndarray[Any, np.dtype[np.int64]] | None]:
    """For each block of a request, the number of the next request that has it; None for a request that cannot fit."""
    following = np.full(trace.num_distinct_ids, _NEVER)
    uses: list[np.ndarray[Any, np.dtype[np.int64]] | None] = []
    for number in range(len(trace.requests) - 1, -1, -1):
        request = trace.requests[number]
        if -(-request.num_tokens // trace.block_size) > num_blocks:
            uses.append(None)
            continue
        uses.append(following[request.blocks])
        following[request.blocks] = number
    return uses[::-1]


def infinite_hit_rate(trace: Trace) -> float:
    """The token hit rate of a cache that never evicts. One token of each prompt is left to compute, here as there."""
    seen = np.zeros(trace.num_distinct_ids, bool)
    num_hits = 0
    for request in trace.requests:
        known = seen[request.blocks]
        num_leading = len(known) if known.all() else int(known.argmin())
        num_hits += min(num_leading, (request.num_tokens - 1) // trace.block_size)
        seen[request.blocks] = True
    return num_hits * trace.block_size / trace.num_tokens
