"""A transfer client whose tasks end where a recording says so."""

from __future__ import annotations

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress
from fastdeploy_cache.transfer_manager.rank.transfer_client import KVArrays, OnKVLost, ignore_kv_lost
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask


class RecordedClient:
    """See `TransferClient`. No bytes move. One thread."""

    def __init__(self, num_ranks: int) -> None:
        self._down: set[int] = set()
        self._num_ranks = num_ranks
        self._tasks: dict[int, TransferTask] = {}

    def start(self, on_result: OnResult, on_kv_lost: OnKVLost = ignore_kv_lost) -> None:  # noqa: ARG002
        self._on_result = on_result

    def submit(self, task: TransferTask) -> None:
        if len(task.destination_ids) or task.units:
            self._tasks[task.task_id] = task
        else:  # it only asks whether all before it has ended
            self._answer(task, None, 0.0)

    def end(self, task_id: int, kind: TaskKind, *, failed: bool, seconds: float) -> None:
        """A task of the recording has ended. Where there is none of that number, which is so once the replay has gone
        another way, the oldest one of its kind ends instead."""
        if task_id not in self._tasks:
            task_id = next((number for number, task in self._tasks.items() if task.kind is kind), -1)
        task = self._tasks.pop(task_id, None)
        if task is not None:
            self._answer(task, "it failed in the recording" if failed else None, seconds)

    def set_up(self, rank: int, *, up: bool) -> None:
        """The recording says that a rank has died, or is there again."""
        (self._down.discard if up else self._down.add)(rank)

    def _answer(self, task: TransferTask, error: str | None, seconds: float) -> None:
        ranks = tuple(RankResult(rank=rank, seconds=seconds, error=error) for rank in range(self._num_ranks))
        self._on_result(TransferResult(task=task, ranks=ranks))

    @property
    def available(self) -> bool:
        return not self._down

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:  # noqa: ARG002
        return self.available

    def cancel(self, task_id: int) -> None:
        """The recording says how it ended."""

    def wait_ready(self, timeout_seconds: float) -> bool:  # noqa: ARG002
        return self.available

    def restart(self, rank: int) -> None:
        pass

    def statuses(self) -> list[RankStatus]:
        return []

    def kv_views(self, rank: int) -> KVViews:
        raise LayoutError(f"rank {rank} of a replay has no bytes")

    def kv_handle(self, rank: int) -> KVHandle:
        raise LayoutError(f"rank {rank} of a replay has no bytes")

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        """There are no bytes."""

    def kv_lost(self, rank: int) -> None:
        """There are no bytes."""

    def layer_progress(self, rank: int) -> LayerProgress | None:  # noqa: ARG002
        return None

    def cpu_segments(self) -> list[SharedArray]:
        return []

    def release_memory(self, *, gpu: bool, cpu: bool) -> int:  # noqa: ARG002
        return 0

    def retake_memory(self) -> None:
        """There is none."""

    def stop(self) -> None:
        tasks, self._tasks = self._tasks, {}
        for task in tasks.values():
            self._answer(task, "the replay is over", 0.0)
