"""What every client of processes can do, whatever their tasks are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

OnResult = Callable[[TransferResult], None]


class ProcessHealth(StrEnum):
    """Whether a process is there, and why not."""

    READY = "ready"
    STARTING = "starting"  # or about to be started again
    SHORT = "short"  # it cannot be started for want of descriptors, threads or memory, and is tried again and again
    OFF = "off"  # it has died too often, and is tried again every `transfer.off_retry_seconds`
    PARKED = "parked"  # there are no KV arrays for it to work on


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One process of a rank as seen from the engine.

    Attributes:
        rank: whose it is. up: whether it is ready. pid: None where there is no process.
        num_restarts: of it, since the start.
        num_busy_lanes: of its two, those that work on a task now.
        state: the same as `up`, in more detail.
        shortage: why it cannot be started now, for want of descriptors, threads or memory; empty where it can.
    """

    rank: int
    up: bool
    num_restarts: int
    pid: int | None = None
    num_busy_lanes: int = 0
    state: ProcessHealth = ProcessHealth.READY
    shortage: str = ""


class TaskClient(Protocol):
    """Takes tasks, answers each exactly once. Any thread may call it."""

    def submit(self, task: TransferTask) -> None:
        """Start a task; never blocks. A task that cannot start is answered as failed, possibly before this returns."""
        ...

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        """Whether so many tasks of this kind, submitted now, would start: the ranks are ready and the queue has room
        for them."""
        ...

    @property
    def available(self) -> bool:
        """Whether every rank's process is ready, with all that it works on."""
        ...

    def statuses(self) -> list[RankStatus]:
        """One entry per process; none where there are no processes."""
        return []

    def stop(self) -> None:
        """End the processes, answer what is in flight as failed, give their memory up. Safe to call twice."""
        ...
