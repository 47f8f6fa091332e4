"""The generations that wait for the engine, and the bell that wakes it."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError


class WaitingLine:
    """Oldest first. Any thread adds and rings; the engine's waits and takes."""

    def __init__(self) -> None:
        self._waiting: deque[Generation] = deque()
        self._changed = threading.Condition()  # guards the others
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def snapshot(self) -> list[Generation]:
        """All that wait now; an `add` meanwhile would change what is iterated over."""
        with self._changed:
            return list(self._waiting)

    def add(self, generation: Generation) -> None:
        """It is the last one from now on.

        Raises:
            GenerationError: the line is closed.
        """
        with self._changed:
            self.check_open()
            self._waiting.append(generation)
            self._changed.notify()

    def add_first(self, generation: Generation) -> None:
        """It was taken already, and comes back."""
        with self._changed:
            self._waiting.appendleft(generation)

    def remove(self, generation: Generation) -> None:
        """It has been taken, or has gone."""
        with self._changed:
            self._waiting.remove(generation)

    def clear(self) -> None:
        """All have gone."""
        with self._changed:
            self._waiting.clear()

    def check_open(self) -> None:
        """Raise `GenerationError` if nobody takes anything from this line any more."""
        with self._changed:
            if self._is_closed:
                raise GenerationError("the engine has stopped")

    def close(self) -> None:
        """Nobody can join any more, and `wait` says so."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()

    def ring(self) -> None:
        """Something that `wait` may wait for has changed. Change it before the call: then it is seen, or this wakes."""
        with self._changed:
            self._changed.notify()

    def wait(self, may_go_on: Callable[[], bool], seconds: Callable[[], float | None]) -> bool:
        """Wait until it may go on, or for so long, as is said when the wait begins; False once the line is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or may_go_on(), seconds())
            return not self._is_closed
