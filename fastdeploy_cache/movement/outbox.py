"""Tasks that were decided on under the manager's lock and are handed over without it."""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol

from fastdeploy_cache.books.mishaps import Mishaps
from fastdeploy_cache.transfer_manager.task import RankResult, TransferResult, TransferTask


class TakesTasks(Protocol):
    """A client, as far as this goes. What `submit` raises a task for, it has not taken."""

    def submit(self, task: TransferTask) -> None: ...


class Calls:
    """Callbacks that were decided on under the manager's lock and are made without it, each once."""

    def __init__(self, mishaps: Mishaps) -> None:
        self._mishaps = mishaps
        self._calls: deque[Callable[[], None]] = deque()

    def __bool__(self) -> bool:
        return bool(self._calls)

    def put(self, call: Callable[[], None]) -> None:
        """Make it with the next `make`."""
        self._calls.append(call)

    def make(self) -> None:
        """Make those that are there, and what comes meanwhile."""
        while self._calls:
            try:
                call = self._calls.popleft()
            except IndexError:  # another thread took it
                return
            self._mishaps.contain("callback", call)


class Outbox:
    """`put` under the lock, `submit` without it: a task's answer may come before its submission returns."""

    def __init__(self, client: TakesTasks, on_result: Callable[[TransferResult], None], mishaps: Mishaps) -> None:
        """`on_result` answers a task that the client has raised for: its ids and its waiters must not stay behind."""
        self._client, self._on_result, self._mishaps = client, on_result, mishaps
        self._tasks: deque[TransferTask] = deque()
        self._submitting = threading.Lock()  # one thread at a time, or tasks would overtake each other

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def put(self, task: TransferTask) -> None:
        """Hand it over with the next `submit`."""
        self._tasks.append(task)

    def submit(self) -> None:
        """Hand over what is there.

        Whoever is in here already, this thread below an answer or another one, takes along what comes meanwhile. It
        looks once more after it has let go: a task put between its last look and that would lie here else.
        """
        while self._tasks and self._submitting.acquire(blocking=False):
            try:
                while self._tasks:
                    task = self._tasks.popleft()
                    if not self._mishaps.contain("client", functools.partial(self._client.submit, task)):
                        refused = RankResult(rank=0, error="the client has raised; see the log", was_tried=False)
                        self._on_result(TransferResult(task=task, ranks=(refused,)))
            finally:
                self._submitting.release()
