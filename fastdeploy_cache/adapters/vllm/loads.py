"""Loads of promised tokens on their way, and what vLLM is told of them. Knows vLLM by duck typing only. One thread."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from fastdeploy_cache.adapters.vllm.sequences import ExternalHit, Sequence
from fastdeploy_cache.adapters.vllm.step import LayerwiseLoad, StepPlan
from fastdeploy_cache.callers.transfers import CallerTransfer

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PromisedLoad:
    """One request's. `missing_ids` were promised, and not even begun; with several groups that is all or none."""

    sequence: Sequence
    transfer: CallerTransfer
    block_ids: list[int]
    missing_ids: list[int]
    hit: ExternalHit
    number: int | None = None  # of the step that computes on it, or that tells of its failure
    is_judged: bool = False  # counted, and logged where it failed

    @property
    def failed_ids(self) -> list[int]:
        """Blocks that do not hold what they should, as far as it has ended."""
        has_failed = self.transfer.done and not self.transfer.succeeded
        return self.missing_ids + self.block_ids if has_failed else self.missing_ids


class PromisedLoads:
    """All that vLLM waits for, or computes on."""

    def __init__(
        self,
        progress_handles: Callable[[], tuple[bytes, ...]],
        longest_seconds: float,
        count: Callable[[Sequence, ExternalHit], None],
        *,
        is_layerwise: bool,
        has_rows: bool,
    ) -> None:
        """`progress_handles`: by rank, to watch a load by. `longest_seconds`: how long one can take. `count`: what a
        request was served with. `has_rows`: the model has several KV cache groups, where an id is of a block in each: a
        load fails by request."""
        self._progress_handles, self._longest_seconds = progress_handles, longest_seconds
        self._count, self._has_rows = count, has_rows
        self.plan = self._plan_layerwise if is_layerwise else self._plan_between
        self._loads: list[PromisedLoad] = []

    def __len__(self) -> int:
        return len(self._loads)

    def begin(self, load: PromisedLoad) -> None:
        """It is on its way, as far as it was begun."""
        self._loads.append(load)

    def uncertain_ids(self) -> set[int]:
        """Blocks that a load may still be writing.

        vLLM lets a request share, within a step, blocks that another one loads in it. Should that load fail, they would
        be stored as they are.
        """
        return {block_id for load in self._loads for block_id in (*load.block_ids, *load.missing_ids)}

    def _plan_between(self, number: int) -> StepPlan:
        """What has ended goes with the step of this number: its requests are computed from the next one on."""
        ended = [load for load in self._loads if load.number is None and load.transfer.done]
        for load in ended:
            load.number = number
            self._judge(load, has_failed=bool(load.failed_ids))
        # a failed one stays until vLLM knows: it takes these blocks for computed, and the request may end before
        self._loads = [load for load in self._loads if load.number is None or load.failed_ids]
        received = frozenset(load.sequence.request.request_id for load in ended)
        failed = [load for load in ended if load.failed_ids]
        if self._has_rows:
            by_request = frozenset(load.sequence.request.request_id for load in failed)
            return StepPlan(number, received=received, failed=by_request)
        failed_ids = frozenset(block_id for load in failed for block_id in load.failed_ids)
        return StepPlan(number, received=received, failed_block_ids=failed_ids)

    def _plan_layerwise(self, number: int) -> StepPlan:
        """The step of this number computes on all that has begun since the last one."""
        fresh = [load for load in self._loads if load.number is None]
        for load in fresh:
            load.number = number
            if load.missing_ids:
                self._judge(load, has_failed=True)
        if not fresh:
            return StepPlan(number)
        return StepPlan(
            number,
            loads=tuple(LayerwiseLoad(load.transfer.task_ids, tuple(load.block_ids)) for load in fresh),
            progress=self._progress_handles(),
            timeout_seconds=self._longest_seconds,
            failed_block_ids=frozenset(block_id for load in fresh for block_id in load.missing_ids),
        )

    def processed(self, number: int) -> None:
        """vLLM has taken in the results of this step, and made again good what failed to load."""
        for load in self._loads:
            if load.number is not None and load.number <= number:
                # workers see the last layer before the manager hears of the task's end; until then its blocks are busy
                load.transfer.wait(self._longest_seconds)
                self._judge(load, has_failed=not load.transfer.succeeded)
        self._loads = [load for load in self._loads if load.number is None or load.number > number]

    def _judge(self, load: PromisedLoad, *, has_failed: bool) -> None:
        """Once for each load: count what came, or say what did not."""
        if load.is_judged:
            return
        load.is_judged = True
        sequence = load.sequence
        self._count(sequence, ExternalHit() if has_failed else load.hit)
        if has_failed:
            sequence.load_failed = True
            num_blocks = len(load.block_ids) + len(load.missing_ids)
            logger.warning("event=load_failed request_id=%s num_blocks=%d", sequence.request.request_id, num_blocks)
