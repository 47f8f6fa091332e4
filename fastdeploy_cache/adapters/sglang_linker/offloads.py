"""Device pages on their way to the CPU tier, in the order in which SGLang hears of their ends. One thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy_cache.callers.transfers import CallerTransfer

Begin = Callable[[], tuple[Sequence[CallerTransfer], bool]]  # the copies, and whether they are of all pages


class _Offload:
    """One, which begins once its pages are written (`events`, of CUDA)."""

    def __init__(self, begin: Begin, events: Sequence[Any]) -> None:
        self._begin, self._events = begin, list(events)
        self._transfers: Sequence[CallerTransfer] = ()
        self._has_begun = self._is_whole = False

    def try_beginning(self) -> bool:
        """Whether it has begun by now."""
        if not self._has_begun and all(event.query() for event in self._events):
            self._has_begun = True  # first: its pages are SGLang's to fill anew, whatever becomes of it
            self._transfers, self._is_whole = self._begin()
        return self._has_begun

    def wait(self, seconds: float) -> None:
        """Wait for its end, which comes by itself."""
        for event in self._events:
            event.synchronize()
        self.try_beginning()
        for transfer in self._transfers:
            transfer.wait(seconds)

    @property
    def is_done(self) -> bool:
        return self._has_begun and all(transfer.done for transfer in self._transfers)

    @property
    def succeeded(self) -> bool:
        """All of its pages are in the CPU tier."""
        return self._is_whole and all(transfer.succeeded for transfer in self._transfers)


class Offloads:
    """First in, first out: SGLang counts their ends."""

    def __init__(self) -> None:
        self._waiting: deque[_Offload] = deque()

    def add(self, begin: Begin, events: Sequence[Any]) -> None:
        """One more, which `begin` starts."""
        self._waiting.append(_Offload(begin, events))
        self.go_on()

    def go_on(self) -> None:
        """Begin what can begin, in order."""
        for each in self._waiting:
            if not each.try_beginning():
                return

    def num_done(self) -> int:
        """How many have ended, counted from the oldest."""
        self.go_on()
        ended = (number for number, each in enumerate(self._waiting) if not each.is_done)
        return next(ended, len(self._waiting))

    def pop(self) -> bool:
        """Whether the oldest, which has ended, has succeeded."""
        return self._waiting.popleft().succeeded

    def end_all(self, seconds: float) -> None:
        """Wait for all of them, of which nobody asks any more."""
        while self._waiting:
            self._waiting.popleft().wait(seconds)
