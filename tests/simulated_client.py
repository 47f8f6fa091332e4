"""A transfer client whose tasks end when the test says so, and which remembers what is in every block."""

from __future__ import annotations

from collections import deque

from transfer_manager.client import OnResult, RankStatus
from transfer_manager.rank_memory import KVViews
from transfer_manager.task import Direction, RankResult, TransferResult, TransferTask


class SimulatedClient:
    """`gpu[i]` and `cpu[i]` hold any marker for the content of a block; copies move markers."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self.gpu: list[object] = [None] * num_gpu_blocks
        self.cpu: list[object] = [None] * num_cpu_blocks
        self.tasks: deque[TransferTask] = deque()
        self.up = True
        self._on_result: OnResult | None = None

    def start(self, on_result: OnResult) -> None:
        self._on_result = on_result

    def submit(self, task: TransferTask) -> None:
        if self.up:
            self.tasks.append(task)
        else:
            self._answer(task, "the rank is down")

    def land(self, error: str | None = None) -> None:
        """End the oldest task. One that fails leaves garbage where it was writing."""
        task = self.tasks.popleft()
        sources = self.cpu if task.direction is Direction.SWAP_IN else self.gpu
        destinations = self.cpu if task.direction is Direction.SWAP_OUT else self.gpu
        for source, destination in zip(task.source_ids.tolist(), task.destination_ids.tolist(), strict=True):
            destinations[destination] = sources[source] if error is None else "garbage"
        self._answer(task, error)

    def land_all(self) -> None:
        while self.tasks:
            self.land()

    def _answer(self, task: TransferTask, error: str | None) -> None:
        assert self._on_result is not None
        self._on_result(TransferResult(task=task, ranks=(RankResult(rank=0, error=error),)))

    @property
    def available(self) -> bool:
        return self.up

    def wait_ready(self, timeout_seconds: float) -> bool:
        return self.up

    def statuses(self) -> list[RankStatus]:
        return [RankStatus(rank=0, up=self.up, num_restarts=0)]

    def kv_views(self, rank: int) -> KVViews:
        return []

    def stop(self) -> None:
        self.up = False
        while self.tasks:
            self.land("stopped")
