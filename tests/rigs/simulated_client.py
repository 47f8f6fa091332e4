"""A transfer client whose tasks end when the test says so, and which remembers what is in every block."""

from __future__ import annotations

from collections import deque

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.transfer_manager.client import OnResult, ProcessHealth, RankStatus
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress
from fastdeploy_cache.transfer_manager.rank.transfer_client import KVArrays, OnKVLost, ignore_kv_lost
from fastdeploy_cache.transfer_manager.task import LEFT_OUT, RankResult, TaskKind, TransferResult, TransferTask


class SimulatedClient:
    """`gpu[i]` and `cpu[i]` hold any marker for the content of a block, and `units[row][i]` for that of a unit; copies
    move markers. Each page of an image holds what all of its units are, and which page it is."""

    def __init__(self, num_gpu_blocks: int, num_cpu_blocks: int, num_rows: int = 0) -> None:
        self.gpu: list[object] = [None] * num_gpu_blocks
        self.cpu: list[object] = [None] * num_cpu_blocks
        self.units: list[dict[int, object]] = [{} for _ in range(num_rows)]
        self.tasks: deque[TransferTask] = deque()
        self.up, self.is_off = True, False
        self.auto = False  # end each task at once
        kinds = (TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.COPY, TaskKind.WIPE)
        self.max_tasks = dict.fromkeys(kinds, 1000)
        self.cancelled: set[int] = set()
        self._on_result: OnResult | None = None

    def start(self, on_result: OnResult, on_kv_lost: OnKVLost = ignore_kv_lost) -> None:
        self._on_result, self._on_kv_lost = on_result, on_kv_lost

    def submit(self, task: TransferTask) -> None:
        if self.up:
            self.tasks.append(task)
            if self.auto:
                self.land_all()
        else:
            self._answer(task, "the rank is down")

    def land(self, error: str | None = None) -> None:
        """End the oldest task. One that fails leaves garbage where it was writing."""
        task = self.tasks.popleft()
        if task.task_id in self.cancelled:
            error = "cancelled"
        if task.units:
            self._move_image(task, is_whole=error is None)
            self._answer(task, error)
            return
        if task.kind is TaskKind.WIPE:
            self._wipe(task, is_whole=error is None)
            self._answer(task, error)
            return
        sources = self.cpu if task.kind is TaskKind.SWAP_IN else self.gpu
        destinations = self.cpu if task.kind is TaskKind.SWAP_OUT else self.gpu
        for source, destination in zip(task.source_ids.tolist(), task.destination_ids.tolist(), strict=True):
            destinations[destination] = sources[source] if error is None else "garbage"
        self._answer(task, error)

    def _wipe(self, task: TransferTask, *, is_whole: bool) -> None:
        for block_id in task.destination_ids.tolist() if is_whole else ():
            self.gpu[block_id] = None
        for block_id in task.source_ids.tolist() if is_whole else ():
            self.cpu[block_id] = None

    def _move_image(self, task: TransferTask, *, is_whole: bool) -> None:
        if task.kind is TaskKind.SWAP_OUT:
            image = [[row.get(unit) for unit in ids.tolist()] for row, ids in zip(self.units, task.units, strict=True)]
            for number, page in enumerate(task.destination_ids.tolist()):
                self.cpu[page] = ("image", image, number) if is_whole else "garbage"
            return
        pages = [self.cpu[page] for page in task.source_ids.tolist()]
        held = pages[0][1] if isinstance(pages[0], tuple) else None
        is_whole = is_whole and pages == [("image", held, number) for number in range(len(pages))]
        for number, (row, ids) in enumerate(zip(self.units, task.units, strict=True)):
            for place, unit in enumerate(ids.tolist()):
                if unit != LEFT_OUT:
                    row[unit] = held[number][place] if is_whole and held is not None else "garbage"

    def land_all(self) -> None:
        while self.tasks:
            self.land()

    def _answer(self, task: TransferTask, error: str | None) -> None:
        assert self._on_result is not None
        self._on_result(TransferResult(task=task, ranks=(RankResult(rank=0, error=error),)))

    @property
    def available(self) -> bool:
        return self.up

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        return self.up and len([t for t in self.tasks if t.kind is kind]) + num_tasks <= self.max_tasks[kind]

    def cancel(self, task_id: int) -> None:
        self.cancelled.add(task_id)

    def wait_ready(self, timeout_seconds: float) -> bool:
        return self.up

    def restart(self, rank: int) -> None:
        pass

    def statuses(self) -> list[RankStatus]:
        state = ProcessHealth.OFF if self.is_off else ProcessHealth.READY if self.up else ProcessHealth.STARTING
        return [RankStatus(rank=0, up=self.up, num_restarts=0, state=state)]

    def kv_views(self, rank: int) -> KVViews:
        return []

    def kv_handle(self, rank: int) -> KVHandle:
        raise LayoutError("simulated blocks have no bytes")

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        pass

    def kv_lost(self, rank: int) -> None:
        self.gpu[:] = ["lost"] * len(self.gpu)

    def layer_progress(self, rank: int) -> LayerProgress | None:
        return None

    def release_memory(self, *, gpu: bool, cpu: bool) -> int:
        if gpu:
            self.gpu = ["released"] * len(self.gpu)
        if cpu:
            self.cpu = ["released"] * len(self.cpu)
        return len(self.gpu) * gpu + len(self.cpu) * cpu

    def retake_memory(self) -> None:
        pass

    def stop(self) -> None:
        self.up = False
        while self.tasks:
            self.land("stopped")
