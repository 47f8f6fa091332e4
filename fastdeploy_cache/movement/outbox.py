"""Tasks that are decided on in a turn and handed over after it."""

from __future__ import annotations

import functools
import threading
from collections import Counter, deque
from collections.abc import Callable
from typing import Protocol, TypeVar

from fastdeploy_cache.books.mishaps import Mishaps
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TaskKind, TransferResult, TransferTask

T = TypeVar("T")


class TakesTasks(Protocol):
    """A client, as far as this goes. What `submit` raises a task for, it has not taken."""

    def submit(self, task: TransferTask) -> None: ...


class InFlight:
    """Tasks that were decided on and that not every rank has answered. Under the lock."""

    def __init__(self, clock: Clock) -> None:
        self._now = clock.now
        self._tasks: dict[int, tuple[TaskKind, float]] = {}

    def begin(self, task: TransferTask) -> None:
        """It is on its way from now on."""
        self._tasks[task.task_id] = task.kind, self._now()

    def end(self, task_id: int) -> float:
        """It has ended; returns how many seconds it was on its way."""
        _, began_at = self._tasks.pop(task_id, (None, None))
        return self._now() - began_at if began_at is not None else 0.0

    def by_kind(self) -> Counter[str]:
        """How many there are of each kind."""
        return Counter([kind.value for kind, _ in self._tasks.values()])


class Outbox:
    """`put` in a turn; `Books` calls `hand_over` after it: a task's answer may come before its submission returns."""

    def __init__(
        self,
        client: TakesTasks,
        on_result: Callable[[TransferResult], None],
        mishaps: Mishaps,
        in_flight: InFlight | None = None,
    ) -> None:
        """`on_result` answers a task that the client has raised for: its ids and its waiters must not stay behind.
        `in_flight`: who keeps what is put here until it has ended."""
        self._in_flight = in_flight
        self._client, self._on_result, self._mishaps = client, on_result, mishaps
        self.queued: deque[TransferTask] = deque()
        self._submitting = threading.Lock()  # one thread at a time, or tasks would overtake each other

    def put(self, task: TransferTask, noted: dict[int, T], of: T) -> None:
        """Hand it over after this turn. Call this last: the task goes out even if what comes after it fails. Before
        that it is `noted`, by its id, as one `of` what it is for: the answer to what is not noted would be nobody's.

        Raises:
            MemoryError: it is neither noted nor handed over.
        """
        noted[task.task_id] = of
        try:
            if self._in_flight is not None:
                self._in_flight.begin(task)
            self.queued.append(task)
        except BaseException:
            del noted[task.task_id]
            if self._in_flight is not None:
                self._in_flight.end(task.task_id)
            raise

    def num_queued(self, lane: Lane) -> int:
        """How many wait here for the end of a turn, of those that go by this lane."""
        return sum([task.kind.lane is lane for task in self.queued]) if self.queued else 0

    def hand_over(self) -> None:
        """Give the client what is there.

        Whoever is in here already, this thread below an answer or another one, takes along what comes meanwhile. It
        looks once more after it has let go. Otherwise a task that was put between its last look and that moment would
        lie here: the thread that put it has found the box busy and gone.
        """
        while self.queued and self._submitting.acquire(blocking=False):
            try:
                while self.queued:
                    task = self.queued[0]
                    submit = functools.partial(self._client.submit, task)
                    self.queued.popleft()
                    if not self._mishaps.contain("client", submit):
                        refused = RankResult(rank=0, error="the client has raised; see the log", was_tried=False)
                        self._on_result(TransferResult(task=task, ranks=(refused,)))
            finally:
                self._submitting.release()
