"""Copies of computed blocks from vLLM's GPU blocks to the CPU tier, while vLLM keeps the blocks. One thread."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from fastdeploy_cache.adapters.vllm.groups import Tables
from fastdeploy_cache.adapters.vllm.kept_blocks import KeptBlocks
from fastdeploy_cache.adapters.vllm.sequences import Sequence, StepWork
from fastdeploy_cache.callers.blocks import CallerBlocks


class Storing:
    """What is being copied down of a model whose layers all keep everything. The next copy of a sequence goes on behind
    the one before."""

    def __init__(
        self, blocks: CallerBlocks, kept: KeptBlocks, block_size: int, uncertain_ids: Callable[[], set[int]]
    ) -> None:
        """`uncertain_ids`: blocks that a load may still be writing."""
        self._blocks, self._kept, self._size, self._uncertain_ids = blocks, kept, block_size, uncertain_ids

    def is_due(self, sequence: Sequence, num_computed_tokens: int, work: StepWork) -> bool:  # noqa: ARG002 (see `Stores`)
        """Whether it has full blocks that were computed and not offered yet."""
        return not sequence.is_storing and num_computed_tokens // self._size > sequence.num_offered

    def store(self, sequence: Sequence, tables: Tables, num_computed_tokens: int, work: StepWork) -> None:  # noqa: ARG002
        """Copy what was computed and not offered."""
        self._copy(sequence, self._computed(tables[0], num_computed_tokens), sequence.num_offered)

    def finish(self, sequence: Sequence, tables: Tables, num_computed_tokens: int) -> None:
        """vLLM is done with the request and frees its blocks after this call: copy all that is computed."""
        ids = self._computed(tables[0], num_computed_tokens)
        if not sequence.is_storing:
            self._copy(sequence, ids, 0)
        elif len(ids) > sequence.num_offered:  # one after the other: a store goes on behind what has arrived
            sequence.rest = self._kept.keep(ids)
        sequence.is_over = True
        note_use(self._blocks, sequence)

    def end_done(self) -> None:
        """Give back the blocks of copies that have ended."""
        for copy in self._kept.pop_done():
            sequence = copy.sequence
            if sequence.rest is not None:
                rest, sequence.rest = sequence.rest, None
                self._copy(sequence, [block.block_id for block in rest], 0)
                self._kept.give_back(rest)
            note_use(self._blocks, sequence)
            self._kept.give_back(copy.blocks)

    def _copy(self, sequence: Sequence, ids: ListOf[int], first: int) -> None:
        """Copy blocks [first, ...) of the request down, as far as they are not there."""
        if len(ids) <= first:
            return
        sequence.follow()
        transfer = self._blocks.copies.swap_out(
            sequence.tokens, ids[first:], first_block=first, generation=sequence.generation
        )
        sequence.num_offered = len(ids)
        if transfer.num_blocks:
            self._kept.begin(sequence, transfer, self._kept.keep(ids[first:]))

    def _computed(self, table: ListOf[int], num_computed_tokens: int) -> list[int]:
        """The full blocks that are computed, up to the first that a load may still be writing."""
        uncertain, ids = self._uncertain_ids(), list(table[: num_computed_tokens // self._size])
        bad = next((i for i, block_id in enumerate(ids) if block_id in uncertain), len(ids))
        return ids[:bad]


def note_use(blocks: CallerBlocks, sequence: Sequence) -> None:
    """Once for each request that was served, when all that it leaves behind is there: else it would not count."""
    if sequence.is_over and sequence.is_counted and not sequence.is_storing:
        blocks.note_use(sequence.tokens, num_found_blocks=sequence.num_found_blocks)
