"""What a client answered: collected on its thread, waited for on the test's."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

SECONDS = 30.0


def task(
    task_id: int, kind: TaskKind, gpu: Sequence[int], cpu: Sequence[int], timeout_seconds: float = SECONDS
) -> TransferTask:
    """A task as the block mover makes them; for a COPY `gpu` are the sources."""
    sources, destinations = (cpu, gpu) if kind is TaskKind.SWAP_IN else (gpu, cpu)
    return TransferTask(
        task_id=task_id,
        kind=kind,
        source_ids=np.array(sources, np.int32),
        destination_ids=np.array(destinations, np.int32),
        deadline=time.monotonic() + timeout_seconds,
    )


class Answers:
    """Give it to `start`: it keeps every result and lets a test wait for them."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._results: list[TransferResult] = []

    def __call__(self, result: TransferResult) -> None:
        with self._changed:
            self._results.append(result)
            self._changed.notify_all()

    def wait(self, num_results: int) -> list[TransferResult]:
        """The results, once there are that many."""
        with self._changed:
            assert self._changed.wait_for(lambda: len(self._results) >= num_results, SECONDS), "no answer came"
            return list(self._results)

    def now(self) -> list[TransferResult]:
        """What was answered until now."""
        with self._changed:
            return list(self._results)

    def of(self, task_id: int) -> list[TransferResult]:
        """The answers to one task until now."""
        return [result for result in self.now() if result.task.task_id == task_id]
