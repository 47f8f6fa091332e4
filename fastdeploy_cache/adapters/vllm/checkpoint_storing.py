"""Copies of full KV and checkpoints from vLLM's GPU blocks to the CPU tier. Knows vLLM by duck typing only. One thread.

A window's block leaves its request's table one step after it was last read, and its id goes to others at once. A state
is handed over in the step that leaves it, and in that step alone. So what a checkpoint needs is kept by a reference
when the step that computes it is scheduled, and copied when that step has been computed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as ListOf
from dataclasses import dataclass
from typing import Any

from fastdeploy_cache.adapters.vllm.groups import GroupMap, Tables
from fastdeploy_cache.adapters.vllm.kept_blocks import KeptBlocks
from fastdeploy_cache.adapters.vllm.sequences import Sequence
from fastdeploy_cache.adapters.vllm.storing import note_use
from fastdeploy_cache.callers.blocks import CallerBlocks

Offers = ListOf[tuple[int, int, int]]  # of states that a step leaves: group, block, tokens


@dataclass(eq=False)
class Claim:
    """What a checkpoint behind `boundary` blocks needs beside full KV. vLLM's `kept` blocks are these units."""

    boundary: int
    units: list[list[int]]
    kept: list[Any]
    is_newest: bool  # of its request's output: it waits for the request's end, or for one that is newer


class CheckpointStoring:
    """Checkpoints are stored where requests return: at the last boundary of a prompt, where it parts from what is
    cached, at each state that vLLM itself keeps, and, of windows, at the last boundary of all."""

    def __init__(self, blocks: CallerBlocks, kept: KeptBlocks, groups: GroupMap, block_size: int) -> None:
        self._blocks, self._kept, self._groups, self._size = blocks, kept, groups, block_size

    def boundaries(self, sequence: Sequence, num_before: int, num_after: int, offers: Offers) -> list[int]:
        """Where a step that computes these tokens leaves checkpoints that are worth it, first to last."""
        before, after = num_before // self._size, num_after // self._size
        if self._groups.states:
            by_tokens = Counter(num_tokens for _, _, num_tokens in offers)
            whole = [tokens for tokens, count in by_tokens.items() if count == len(self._groups.states)]
            return sorted(tokens // self._size for tokens in whole if not tokens % self._size)
        if after <= before:
            return []
        last = self._last(sequence)
        found = {each for each in (sequence.branch, last) if before < each <= after}
        return sorted(found | {after} if after > last else found)

    def _last(self, sequence: Sequence) -> int:
        """The last boundary at which the same prompt could go on."""
        return int((sequence.request.num_prompt_tokens - 1) // self._size)

    def claim(self, sequence: Sequence, boundary: int, tables: Tables, offers: Offers) -> None:
        """The step that is being scheduled computes the request up to this boundary, or past it."""
        units = list[list[int]]()
        states = {group: block_id for group, block_id, num_tokens in offers if num_tokens == boundary * self._size}
        for group, positions in zip(self._groups.rows, self._blocks.units.positions(boundary), strict=True):
            is_state, table = group in self._groups.states, tables[group]
            units.append([states.get(group, 0)] if is_state else [table[each] for each in positions])
        if not all(unit for each in units for unit in each):  # vLLM's null block: it has gone already
            return
        is_newest = boundary > self._last(sequence)
        kept = self._kept.keep(unit for each in units for unit in each)
        if is_newest:
            self.drop(sequence, [each for each in sequence.claims if each.is_newest])
        sequence.claims.append(Claim(boundary, units, kept, is_newest))

    def due(self, sequence: Sequence, num_computed_tokens: int, num_scheduled_tokens: int) -> bool:
        """Whether one of its claims can be copied now. Those go of which a preemption has taken the tokens back.

        `num_scheduled_tokens`: with what steps that still run compute."""
        lost = [each for each in sequence.claims if each.boundary * self._size > num_scheduled_tokens]
        self.drop(sequence, lost)
        return not sequence.is_storing and self._first_due(sequence, num_computed_tokens) is not None

    def _first_due(self, sequence: Sequence, num_computed_tokens: int, *, is_over: bool = False) -> Claim | None:
        computed = num_computed_tokens // self._size
        return next(
            (each for each in sequence.claims if each.boundary <= computed and (is_over or not each.is_newest)), None
        )

    def start(self, sequence: Sequence, table: ListOf[int], num_computed_tokens: int, *, is_over: bool = False) -> None:
        """Copy the first claim that is due, and the full KV in front of it, of which this is vLLM's table."""
        while not sequence.is_storing:
            claim = self._first_due(sequence, num_computed_tokens, is_over=is_over)
            if claim is None:
                return
            sequence.claims.remove(claim)
            sequence.follow()
            ids = list(table[: claim.boundary])
            transfer = self._blocks.copies.swap_out(
                sequence.tokens, ids, generation=sequence.generation, units=claim.units
            )
            if transfer.num_checkpoint_blocks is not None:
                self._kept.begin(sequence, transfer, [*self._kept.keep(ids), *claim.kept])
            else:
                self._kept.give_back(claim.kept)

    def finish(self, sequence: Sequence, table: ListOf[int], num_computed_tokens: int) -> None:
        """vLLM is done with the request and frees its blocks after this call."""
        sequence.is_over = True
        self.start(sequence, table, num_computed_tokens, is_over=True)
        waiting = [each for each in sequence.claims if each.boundary * self._size <= num_computed_tokens]
        self.drop(sequence, [each for each in sequence.claims if each not in waiting])
        if waiting:
            num_blocks = max(each.boundary for each in waiting)
            sequence.rest = self._kept.keep(table[:num_blocks])
        note_use(self._blocks, sequence)

    def end_done(self) -> None:
        """Give back the blocks of copies that have ended; of requests that are over, go on with what waits."""
        for store in self._kept.pop_done():
            sequence = store.sequence
            if sequence.rest is not None:
                table = [block.block_id for block in sequence.rest]
                self.start(sequence, table, len(table) * self._size, is_over=True)
                if not sequence.claims:
                    rest, sequence.rest = sequence.rest, None
                    self._kept.give_back(rest)
            note_use(self._blocks, sequence)
            self._kept.give_back(store.blocks)

    def drop(self, sequence: Sequence, claims: ListOf[Claim]) -> None:
        """Nobody copies these any more."""
        for claim in claims:
            sequence.claims.remove(claim)
            self._kept.give_back(claim.kept)
