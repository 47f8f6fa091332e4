"""Copies from vLLM's blocks that are on their way, and the blocks that vLLM keeps for them. One thread."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

from fastdeploy_cache.adapters.vllm.sequences import Sequence
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK


@dataclass(eq=False)
class KeptCopy:
    """One copy. vLLM's `blocks` are kept by a reference while they are read."""

    sequence: Sequence
    transfer: CallerTransfer
    blocks: list[Any]


class KeptBlocks:
    """vLLM gives none of these to others, whatever becomes of their request (finished, aborted, preempted)."""

    def __init__(self) -> None:
        self._block_pool: Any = None
        self._stores: list[KeptCopy] = []

    def bind(self, block_pool: Any) -> None:
        """vLLM's `BlockPool`, whose blocks are kept."""
        self._block_pool = block_pool

    @property
    def is_busy(self) -> bool:
        """Blocks are kept until they are copied."""
        return bool(self._stores)

    def keep(self, block_ids: Iterable[int]) -> list[Any]:
        """Take a reference to each."""
        blocks = [self._block_pool.blocks[block_id] for block_id in block_ids]
        self._block_pool.touch(blocks)
        return blocks

    def give_back(self, blocks: ListOf[Any]) -> None:
        """The reverse."""
        self._block_pool.free_blocks(reversed(blocks))

    def begin(self, sequence: Sequence, transfer: CallerTransfer, blocks: list[Any]) -> None:
        """A copy has begun. A sequence has one on its way at a time."""
        sequence.is_storing = True
        self._stores.append(KeptCopy(sequence, transfer, blocks))

    def pop_done(self) -> Iterator[KeptCopy]:
        """Those that have ended. Whoever asks gives their blocks back."""
        # asked once each: between two questions one may end, and would be in neither list
        stores, self._stores = self._stores, []
        done = list[KeptCopy]()
        for store in stores:
            (done if store.transfer.done else self._stores).append(store)
        for store in done:
            store.sequence.is_storing = False
            yield store

    def wait(self, timeout_seconds: float, end_done: Callable[[], object]) -> bool:
        """Wait until all copies have ended and their blocks are given back; whether that was in time."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        while self._stores:
            left = deadline - SYSTEM_CLOCK.now()
            if left <= 0:
                return False
            self._stores[0].transfer.wait(left)
            end_done()
        return True
