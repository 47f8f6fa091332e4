"""What becomes of a question to a store to remove all that it has of a namespace."""

from __future__ import annotations

from typing import Self

from fastdeploy_cache.ipc.clock import Event


class StorageForget:
    """One such question. `why_not` says, once it is `done`, why not all has been removed; "" where it has."""

    def __init__(self, namespace: str, done: Event, why_not: str = "") -> None:
        self.namespace, self.done, self.why_not = namespace, done, why_not
        self.num_objects = 0
        if why_not:
            done.set()

    def ended(self) -> Self:
        """Itself: there is nothing to wait for."""
        self.done.set()
        return self
