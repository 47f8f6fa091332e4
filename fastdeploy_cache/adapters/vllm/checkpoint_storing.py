"""Copies of full KV and checkpoints from vLLM's GPU blocks to the CPU tier. Knows vLLM by duck typing only. One thread.

A window's block leaves its request's table one step after it was last read, and its id goes to others at once. A state
is handed over in the step that leaves it, and in that step alone. So what a checkpoint needs is kept by a reference
when the step that computes it is scheduled, and copied when that step has been computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as ListOf

from fastdeploy_cache.adapters.vllm.groups import GroupMap, Tables
from fastdeploy_cache.adapters.vllm.kept_blocks import KeptBlocks
from fastdeploy_cache.adapters.vllm.sequences import PendingCheckpoint, Sequence, StepWork
from fastdeploy_cache.adapters.vllm.storing import note_use
from fastdeploy_cache.callers.blocks import CallerBlocks


class CheckpointStoring:
    """Checkpoints are stored where requests return: at the last boundary of a prompt, where it parts from what is
    cached, at each state that vLLM itself keeps, and, of windows, at the last boundary of all."""

    def __init__(
        self, blocks: CallerBlocks, kept: KeptBlocks, groups: GroupMap, block_size: int, *, caches_outputs: bool
    ) -> None:
        self._blocks, self._kept, self._groups, self._size = blocks, kept, groups, block_size
        self._caches_outputs = caches_outputs
        self._pending: dict[Sequence, None] = {}  # those that had some at the last step

    def is_due(self, sequence: Sequence, num_computed_tokens: int, work: StepWork) -> bool:
        """Whether a checkpoint of it can be copied now, or the step makes one."""
        is_due = not sequence.is_storing and self._first_due(sequence, num_computed_tokens) is not None
        return is_due or bool(self._boundaries(sequence, work))

    def store(self, sequence: Sequence, tables: Tables, num_computed_tokens: int, work: StepWork) -> None:
        """Copy what is due, and keep what the step is going to leave."""
        self._start(sequence, tables[self._groups.full], num_computed_tokens)
        for boundary in self._boundaries(sequence, work):
            self._keep(sequence, boundary, tables, work)

    def finish(self, sequence: Sequence, tables: Tables, num_computed_tokens: int) -> None:
        """vLLM is done with the request and frees its blocks after this call."""
        sequence.is_over = True
        table = tables[self._groups.full]
        self._start(sequence, table, num_computed_tokens)
        computed = num_computed_tokens // self._size
        self._drop(sequence, [each for each in sequence.pending if each.boundary > computed])
        if sequence.pending:
            sequence.rest = self._kept.keep(table[: max(each.boundary for each in sequence.pending)])
        note_use(self._blocks, sequence)

    def end_done(self) -> None:
        """Give back the blocks of copies that have ended; of requests that are over, go on with what waits. What a
        preemption has taken the tokens of is kept no longer: others may wait for its blocks."""
        for sequence in list(self._pending):
            num_tokens = sequence.request.num_computed_tokens
            if not sequence.is_over:
                self._drop(sequence, [each for each in sequence.pending if each.boundary * self._size > num_tokens])
            if not sequence.pending:
                del self._pending[sequence]
        for copy in self._kept.pop_done():
            sequence = copy.sequence
            if sequence.rest is not None:
                table = [block.block_id for block in sequence.rest]
                self._start(sequence, table, len(table) * self._size)
                if not sequence.pending:
                    rest, sequence.rest = sequence.rest, None
                    self._kept.give_back(rest)
            note_use(self._blocks, sequence)
            self._kept.give_back(copy.blocks)

    def _boundaries(self, sequence: Sequence, work: StepWork) -> list[int]:
        """Where the step leaves checkpoints that are worth it, first to last."""
        before, after = work.num_before // self._size, work.num_after // self._size
        if self._groups.states:
            by_tokens = Counter(num_tokens for _, _, num_tokens in work.offers)
            whole = [tokens for tokens, count in by_tokens.items() if count == len(self._groups.states)]
            found = sorted(tokens // self._size for tokens in whole if not tokens % self._size)
        elif after > before:
            last = self._last(sequence)
            at = {each for each in (sequence.branch, last) if before < each <= after}
            found = sorted(at | {after} if after > last else at)
        else:
            found = []
        is_hit = work.num_before == sequence.num_admitted_tokens == before * self._size
        if is_hit and sequence.num_checkpoint_blocks < before:  # vLLM has it, and the CPU tier has not: a copy failed
            found.insert(0, before)
        num_prompt_tokens = sequence.request.num_prompt_tokens
        return [each for each in found if self._caches_outputs or each * self._size <= num_prompt_tokens]

    def _last(self, sequence: Sequence) -> int:
        """The last boundary at which the same prompt could go on."""
        return int((sequence.request.num_prompt_tokens - 1) // self._size)

    def _keep(self, sequence: Sequence, boundary: int, tables: Tables, work: StepWork) -> None:
        """The step that is being scheduled computes the request up to this boundary, or past it."""
        units = list[list[int]]()
        states = {group: block_id for group, block_id, num_tokens in work.offers if num_tokens == boundary * self._size}
        is_hit = boundary * self._size == work.num_before  # then its states are where the tables say
        for group, positions in zip(self._groups.rows, self._blocks.units.positions(boundary), strict=True):
            is_state, table = group in self._groups.states and not is_hit, tables[group]
            units.append([states.get(group, 0)] if is_state else [table[each] for each in positions])
        if not all(unit for each in units for unit in each):  # vLLM's null block: it has gone already
            return
        is_newest = boundary > self._last(sequence)
        kept = self._kept.keep(unit for each in units for unit in each)
        if is_newest:
            self._drop(sequence, [each for each in sequence.pending if each.is_newest])
        sequence.pending.append(PendingCheckpoint(boundary, units, kept, is_newest))
        self._pending[sequence] = None

    def _first_due(self, sequence: Sequence, num_computed_tokens: int) -> PendingCheckpoint | None:
        computed = num_computed_tokens // self._size
        fits = (each for each in sequence.pending if each.boundary <= computed)
        return next((each for each in fits if sequence.is_over or not each.is_newest), None)

    def _start(self, sequence: Sequence, table: ListOf[int], num_computed_tokens: int) -> None:
        """Copy the first checkpoint that is due, and the full KV in front of it, of which this is vLLM's table."""
        while not sequence.is_storing:
            pending = self._first_due(sequence, num_computed_tokens)
            if pending is None:
                return
            sequence.pending.remove(pending)
            sequence.follow()
            ids = list(table[: pending.boundary])
            transfer = self._blocks.copies.swap_out(
                sequence.tokens, ids, generation=sequence.generation, units=pending.units
            )
            if transfer.num_checkpoint_blocks is not None:
                self._kept.begin(sequence, transfer, [*self._kept.keep(ids), *pending.kept])
            else:
                self._kept.give_back(pending.kept)

    def _drop(self, sequence: Sequence, pending: ListOf[PendingCheckpoint]) -> None:
        """Nobody copies these any more."""
        for each in pending:
            sequence.pending.remove(each)
            self._kept.give_back(each.kept)
