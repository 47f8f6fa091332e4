"""Tasks that were decided on under the manager's lock and are handed over without it."""

from __future__ import annotations

import threading
from collections import deque
from typing import Protocol

from transfer_manager.task import TransferTask


class TakesTasks(Protocol):
    """A client, as far as this goes."""

    def submit(self, task: TransferTask) -> None: ...


class Outbox:
    """`put` under the lock, `submit` without it: a task's answer may come before its submission returns."""

    def __init__(self, client: TakesTasks) -> None:
        self._client = client
        self._tasks: deque[TransferTask] = deque()
        self._submitting: set[int] = set()  # threads

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def put(self, task: TransferTask) -> None:
        """Hand it over with the next `submit`."""
        self._tasks.append(task)

    def submit(self) -> None:
        """Hand over what is there.

        An answer may start more; the thread that is in here already takes that along, or each answer would go a level
        deeper.
        """
        thread = threading.get_ident()
        if thread in self._submitting:
            return
        self._submitting.add(thread)
        try:
            while self._tasks:
                try:
                    task = self._tasks.popleft()
                except IndexError:  # another thread took it
                    return
                self._client.submit(task)
        finally:
            self._submitting.discard(thread)
