"""What the scheduler's half of the vLLM connector tells the workers' half with every step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerwiseLoad:
    """A load that this step computes on: its tasks, and the GPU blocks that they fill."""

    task_ids: tuple[int, ...]
    block_ids: tuple[int, ...]


@dataclass(frozen=True)
class StepPlan:
    """One engine step. Goes to every worker by vLLM's own channel.

    Attributes:
        number: counts the steps.
        loads: what a worker waits for, layer by layer; `progress` has the handle to watch it by, one for each rank.
        timeout_seconds: how long it waits at most.
        received: requests whose loads between steps have ended, well or not.
        failed_block_ids: GPU blocks that were promised and do not hold what they should.
        failed: the same of a model with several groups, where an id is of a block in each: requests, of those received.
    """

    number: int
    loads: tuple[LayerwiseLoad, ...] = ()
    progress: tuple[bytes, ...] = ()
    timeout_seconds: float = 0.0
    received: frozenset[str] = frozenset()
    failed_block_ids: frozenset[int] = frozenset()
    failed: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WorkerKV:
    """One worker's KV arrays: `KVHandle.to_bytes()`, and the order of dimensions inside a block, such as `NHC`."""

    handle: bytes
    order: str
