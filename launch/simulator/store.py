"""A store without bytes, for the simulator: which blocks it has, and which go when it is full, as in the file store."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus
from fastdeploy_cache.transfer_manager.storage.file_admission import Admission
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask


class SimulatedStore:
    """A `StorageClient` that answers each task at once. The least recently used go first; of a chain, its end."""

    needs_token_ids = False
    available = True

    def __init__(self, num_blocks: int, admission: str) -> None:
        """`admission`: which blocks are taken, as `StorageConfig.admission`."""
        self.num_blocks = num_blocks
        self.num_evicted = 0
        self._hashes: OrderedDict[bytes, None] = OrderedDict()  # the least recently used first
        self._admission = Admission(admission, 0.0, num_blocks)

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        """See `StorageClient`."""
        self._on_result = on_result
        on_ready()

    def submit(self, task: TransferTask) -> None:
        """See `TaskClient`."""
        hashes = [task.hashes[i : i + HASH_BYTES] for i in range(0, len(task.hashes), HASH_BYTES)]
        num_blocks = 1  # of a probe: writing works
        if task.kind is TaskKind.WRITE:
            num_blocks = self._write(hashes)
        elif task.kind is not TaskKind.PROBE:
            num_blocks = next((i for i, each in enumerate(hashes) if each not in self._hashes), len(hashes))
            if task.kind is TaskKind.PREFETCH:
                self._touch(hashes[:num_blocks])
        self._on_result(TransferResult(task=task, ranks=(RankResult(rank=0, num_blocks=num_blocks),)))

    def _write(self, hashes: Sequence[bytes]) -> int:
        missing = [each for each in hashes if each not in self._hashes]
        taken = missing[: min(self._admission.admit(missing, None), self.num_blocks)]
        self._touch([each for each in hashes if each in self._hashes])
        for _ in range(len(self._hashes) + len(taken) - self.num_blocks):
            self._hashes.popitem(last=False)
            self.num_evicted += 1
        self._hashes.update(dict.fromkeys(reversed(taken)))
        self._admission.written(taken)
        return next((i for i, each in enumerate(hashes) if each not in self._hashes), len(hashes))

    def _touch(self, hashes: Sequence[bytes]) -> None:
        for each in reversed(hashes):
            self._hashes.move_to_end(each)

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:  # noqa: ARG002
        """See `TaskClient`: nothing ever waits here."""
        return kind is not TaskKind.CLEAR

    def cancel(self, task_id: int) -> None:
        """See `TransferClient`: every task has ended."""

    def statuses(self) -> list[RankStatus]:
        """See `TaskClient`: there are no processes."""
        return []

    def stop(self) -> None:
        """See `TaskClient`: there is nothing to end."""
