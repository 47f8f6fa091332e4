"""Copies of computed blocks from vLLM's GPU blocks to the CPU tier, while vLLM keeps the blocks. One thread."""

from __future__ import annotations

from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

from fastdeploy_cache.adapters.vllm.sequences import Sequence
from fastdeploy_cache.callers.blocks import CallerBlocks
from fastdeploy_cache.callers.transfers import CallerTransfer
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK


@dataclass(eq=False)
class _Store:
    sequence: Sequence
    transfer: CallerTransfer
    blocks: list[Any]  # vLLM's, kept by a reference while they are read


class Storing:
    """What is being copied down. A sequence has one copy on its way at a time: the next goes on behind it."""

    def __init__(self, blocks: CallerBlocks) -> None:
        self._blocks = blocks
        self._block_pool: Any = None
        self._stores: list[_Store] = []

    def bind(self, block_pool: Any) -> None:
        """vLLM's `BlockPool`, whose blocks are kept."""
        self._block_pool = block_pool

    @property
    def is_busy(self) -> bool:
        """Blocks are kept until they are copied."""
        return bool(self._stores)

    def store(self, sequence: Sequence, ids: ListOf[int], first: int) -> None:
        """Copy blocks [first, ...) of the request down, as far as they are not there."""
        if len(ids) <= first:
            return
        sequence.follow()
        transfer = self._blocks.copies.swap_out(
            sequence.tokens, ids[first:], first_block=first, generation=sequence.generation
        )
        sequence.num_offered = len(ids)
        if transfer.num_blocks:
            sequence.is_storing = True
            self._stores.append(_Store(sequence, transfer, self._keep(ids[first:])))

    def store_last(self, sequence: Sequence, ids: ListOf[int]) -> None:
        """vLLM is done with the request and frees its blocks after this call: copy all that is computed."""
        if not sequence.is_storing:
            self.store(sequence, ids, 0)
        elif len(ids) > sequence.num_offered:  # one after the other: a store goes on behind what has arrived
            sequence.rest = self._keep(ids)
        sequence.is_over = True
        self._note_use(sequence)

    def end_done(self) -> None:
        """Give back the blocks of copies that have ended."""
        # asked once each: between two questions one may end, and would be in neither list
        stores, self._stores = self._stores, []
        for store in stores:
            if not store.transfer.done:
                self._stores.append(store)
                continue
            sequence = store.sequence
            sequence.is_storing = False
            if sequence.rest is not None:
                rest, sequence.rest = sequence.rest, None
                self.store(sequence, [block.block_id for block in rest], 0)
                self._block_pool.free_blocks(reversed(rest))
            self._note_use(sequence)
            self._block_pool.free_blocks(reversed(store.blocks))

    def wait(self, timeout_seconds: float) -> bool:
        """Wait until all copies have ended and their blocks are given back; whether that was in time."""
        deadline = SYSTEM_CLOCK.now() + timeout_seconds
        while self._stores:
            left = deadline - SYSTEM_CLOCK.now()
            if left <= 0:
                return False
            self._stores[0].transfer.wait(left)
            self.end_done()
        return True

    def _note_use(self, sequence: Sequence) -> None:
        """Once for each request that was served, when all that it leaves behind is there: else it would not count."""
        if sequence.is_over and sequence.is_counted and not sequence.is_storing:
            self._blocks.note_use(sequence.tokens, num_found_blocks=sequence.num_found_blocks)

    def _keep(self, block_ids: ListOf[int]) -> list[Any]:
        """vLLM must not give these to others, whatever becomes of their request (finished, aborted, preempted)."""
        blocks = [self._block_pool.blocks[block_id] for block_id in block_ids]
        self._block_pool.touch(blocks)
        return blocks
