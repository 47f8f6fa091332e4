"""The door to the ranks, and the same contract without any process."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from transfer_manager.device.cpu import CpuDevice
from transfer_manager.errors import DeviceError
from transfer_manager.layout import RankLayout
from transfer_manager.rank_memory import KVViews, create_rank_memory
from transfer_manager.task import RankResult, TransferResult, TransferTask

OnResult = Callable[[TransferResult], None]


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """One rank as seen from the engine."""

    rank: int
    up: bool
    num_restarts: int
    pid: int | None = None


class TransferClient(Protocol):
    """Takes transfer tasks, answers each exactly once. Any thread may call it."""

    def start(self, on_result: OnResult) -> None:
        """Make the ranks ready. `on_result` gets every task's end, on any thread, never under a lock of the client.

        Raises:
            RankStartError: a rank failed or was too late; all ranks are gone again.
        """
        ...

    def submit(self, task: TransferTask) -> None:
        """Start a task; never blocks. A task that cannot start is answered as failed, possibly before this returns."""
        ...

    @property
    def available(self) -> bool:
        """Whether a task submitted now would start: every rank is ready and the queue has room."""
        ...

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until every rank is ready; False when the time is over first."""
        ...

    def statuses(self) -> list[RankStatus]:
        """One entry per rank process; none where there are no processes."""
        ...

    def kv_views(self, rank: int) -> KVViews:
        """Per layer, by part name, the rank's KV array [num_gpu_blocks, *part shape]."""
        ...

    def stop(self) -> None:
        """End the ranks, answer what is in flight as failed, give the memory up. Safe to call twice."""
        ...


class InlineClient:
    """No processes: `submit` copies in the caller's thread. Without a layout it moves no bytes (simulation)."""

    def __init__(self, layout: RankLayout | None, num_gpu_blocks: int, num_cpu_blocks: int, tp_size: int = 1) -> None:
        self._memory = create_rank_memory(tp_size, layout, num_gpu_blocks, num_cpu_blocks) if layout else []
        self._devices = (
            [CpuDevice(layout, m.kv, m.cpu, num_gpu_blocks, num_cpu_blocks) for m in self._memory] if layout else []
        )
        self._tp_size = tp_size
        self._on_result: OnResult | None = None
        self._open = False

    def start(self, on_result: OnResult) -> None:
        self._on_result = on_result
        self._open = True

    def submit(self, task: TransferTask) -> None:
        assert self._on_result is not None, "submit before start"
        devices = self._devices
        results = tuple(self._swap(task, rank, devices) for rank in range(self._tp_size))
        self._on_result(TransferResult(task=task, ranks=results))

    def _swap(self, task: TransferTask, rank: int, devices: list[CpuDevice]) -> RankResult:
        started, num_bytes, error = time.monotonic(), 0, None
        if not self._open:
            error = "the client has stopped"
        elif devices:
            try:
                num_bytes = devices[rank].copy(task.direction, task.source_ids, task.destination_ids, lambda _: None)
            except DeviceError as failure:
                error = f"{type(failure).__name__}: {failure}"
        return RankResult(rank=rank, num_bytes=num_bytes, seconds=time.monotonic() - started, error=error)

    @property
    def available(self) -> bool:
        return self._open

    def wait_ready(self, timeout_seconds: float) -> bool:  # noqa: ARG002 (there is nothing to wait for)
        return self.available

    def statuses(self) -> list[RankStatus]:
        return []

    def kv_views(self, rank: int) -> KVViews:
        return self._memory[rank].kv_views()

    def stop(self) -> None:
        self._open = False
        self._devices = []
        for memory in self._memory:
            memory.close()
