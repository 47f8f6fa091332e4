"""What becomes of a question to a store to remove all that it has of a namespace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from fastdeploy_cache.ipc.clock import Event


class StorageForget:
    """One such question. `why_not` says, once it is `done`, why not all has been removed; "" where it has."""

    def __init__(self, namespace: str, done: Event) -> None:
        self.namespace, self.done = namespace, done
        self.num_objects, self.why_not = 0, ""
        self.ask: Callable[[], bool] | None = None  # asks the store, if that can be now; until it is asked

    def go_on(self) -> bool:
        """Ask, where the store could not be asked yet, such as while a process of it comes back. Whether it is `done`.
        Under the lock."""
        if self.ask is not None and self.ask():
            self.ask = None
        return self.done.is_set()

    def end(self, why_not: str = "") -> Self:
        """There is nothing to wait for any more. Returns itself."""
        self.why_not = why_not
        self.done.set()
        return self
