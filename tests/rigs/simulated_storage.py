"""A store whose tasks end when the test says so, beside `SimulatedClient`: markers instead of bytes."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable

from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus
from fastdeploy_cache.transfer_manager.storage.keys import owned
from fastdeploy_cache.transfer_manager.task import RankResult, TaskKind, TransferResult, TransferTask
from tests.rigs.simulated_client import SimulatedClient

_HASH_BYTES = 32


class SimulatedStorage:
    """`objects` maps a block hash to the marker of its content; `present` says what look-ups answer where that lies."""

    needs_token_ids = False

    def __init__(self, memory: SimulatedClient, objects: dict[bytes, object] | None = None) -> None:
        self.memory = memory
        self.objects: dict[bytes, object] = objects if objects is not None else {}
        self.tasks: deque[TransferTask] = deque()
        self.up = True
        self.lies = False  # look-ups find everything
        self.max_read = 10**9  # leading blocks of a read that come whole
        self.cancelled: set[int] = set()
        self.declines = False  # writes, as an admission filter does
        self.probes_write = True
        self.capacity = 10**9  # objects; the oldest go for later ones
        self.answers_at_once = False
        self.num_offers: Counter[bytes] = Counter()
        self.seconds = 0.001  # that each task is said to have taken
        self.counts: dict[str, int] | None = None  # what the store says of itself
        self._on_result: OnResult | None = None

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        self._on_result, self._on_ready = on_result, on_ready
        on_ready()

    def come_back(self) -> None:
        """Its processes are ready again."""
        self.up = True
        self._on_ready()

    def submit(self, task: TransferTask) -> None:
        if self.up:
            self.tasks.append(task)
            if self.answers_at_once:
                self.land_all()
        else:
            self._answer(task, 0, "the store is down", was_tried=False)

    def _forget(self, owner: bytes) -> int:
        mine = [name for name in self.objects if owned(name, owner) == name]
        for name in mine:
            del self.objects[name]
        return len(mine)

    def land(self, error: str | None = None) -> None:
        """End the oldest task; what a failed read leaves is garbage."""
        task = self.tasks.popleft()
        was_tried = task.task_id not in self.cancelled and error != "stopped"
        if not was_tried:
            error = error or "cancelled"
        if task.kind is TaskKind.FORGET:
            self._answer(task, self._forget(task.owner) if error is None else 0, error, was_tried)
            return
        starts = range(0, len(task.hashes), _HASH_BYTES)
        hashes = [owned(task.hashes[start : start + _HASH_BYTES], task.owner) for start in starts]
        there = [self.lies or h in self.objects for h in hashes]
        num_there = there.index(False) if False in there else len(there)
        if task.kind is TaskKind.LOOKUP:
            self._answer(task, num_there, error, was_tried)
            return
        if task.kind is TaskKind.PROBE:
            for block in task.destination_ids.tolist():
                self.memory.cpu[block] = "noise"
            self._answer(task, int(self.probes_write), error, was_tried)
            return
        if task.kind is TaskKind.WRITE:
            self.num_offers.update(hashes)
            num_taken = 0 if self.declines else len(hashes)
            for key, block in zip(hashes[:num_taken], task.source_ids.tolist(), strict=False):
                if error is None:
                    self.objects.setdefault(key, self.memory.cpu[block])
            self.drop(len(self.objects) - self.capacity)
            self._answer(task, num_taken, error, was_tried)
            return
        num_whole = 0
        for i, (key, block) in enumerate(zip(hashes, task.destination_ids.tolist(), strict=True)):
            whole = error is None and i == num_whole < self.max_read and key in self.objects
            self.memory.cpu[block] = self.objects[key] if whole else "garbage"
            num_whole += whole
        self._answer(task, num_whole, error, was_tried)

    def drop(self, num: int) -> None:
        """Forget the oldest objects; nobody is told."""
        for key in list(self.objects)[: max(0, num)]:
            del self.objects[key]

    def land_all(self) -> None:
        while self.tasks:
            self.land()

    def _answer(self, task: TransferTask, num_blocks: int, error: str | None, was_tried: bool = True) -> None:
        assert self._on_result is not None
        result = RankResult(
            rank=0,
            num_bytes=num_blocks,
            num_blocks=num_blocks,
            seconds=self.seconds,
            error=error,
            was_tried=was_tried,
            counts=self.counts,
        )
        self._on_result(TransferResult(task=task, ranks=(result,)))

    def cancel(self, task_id: int) -> None:
        self.cancelled.add(task_id)

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        return self.up

    @property
    def available(self) -> bool:
        return self.up

    def statuses(self) -> list[RankStatus]:
        return [RankStatus(rank=0, up=self.up, num_restarts=0)]

    def stop(self) -> None:
        self.up = False
        while self.tasks:
            self.land("stopped")
