"""One clock for a process: what time it is, how its threads wait, and what chance gives it.

Nothing else of the engine side reads time, makes timers or draws lots, so a test can hand in a clock that only the test
moves, and the same run can be had again.
"""

from __future__ import annotations

import numbers
import os
import threading
import time
from collections.abc import Callable
from typing import Any, Final, Protocol

from fastdeploy_cache.errors import RequestError

LONGEST_SECONDS = 86400.0  # the clocks of threads and of the kernel end somewhere, and nobody waits for ever here


class Event(Protocol):
    """What threads wait for; see `threading.Event`."""

    def is_set(self) -> bool: ...
    def set(self) -> None: ...
    def clear(self) -> None: ...
    def wait(self, timeout: float) -> bool: ...


class Polls(Protocol):
    """A poller of ZeroMQ."""

    def poll(self, timeout: int) -> list[tuple[Any, int]]: ...


class Alarm(Protocol):
    """A call that will be made."""

    def cancel(self) -> None:
        """Do not make it, if it has not begun. Any number of times."""
        ...

    def join(self, timeout: float) -> None:
        """Wait until it has been made, or never will be."""
        ...


class Clock:
    """The machine's own time and waits. Any thread.

    A subclass sets its own after `__init__`. Child processes go by the machine's clock, whatever the engine has: a
    deadline of another clock says nothing to them, so theirs is the place of stand-ins.

    Attributes:
        age: the seconds by which what is cached becomes old; those of `now`, unless somebody gives others.
        now: seconds of the monotonic clock, which all processes of a machine share.
        unix: seconds since 1970.
        sleep: waits for nothing but time.
        event: makes an event that threads wait for.
        random_bytes: so many bytes that nobody can foresee.
    """

    def __init__(self, age: Callable[[], float] | None = None) -> None:
        self.now: Callable[[], float] = time.monotonic  # itself: no call is added
        self.unix: Callable[[], float] = time.time
        self.sleep: Callable[[float], None] = time.sleep
        self.event: Callable[[], Event] = threading.Event
        self.random_bytes: Callable[[int], bytes] = os.urandom
        self.age = age if age is not None else self.now

    def seconds_to(self, when: float) -> float:
        """Tell how long it is until then; 0 where that is over."""
        return max(0.0, when - self.now())

    def call_at(self, when: float, call: Callable[[], object]) -> Alarm:
        """Make this call at that time of `now`, or at once where it is over, on a thread of its own."""
        timer = threading.Timer(self.seconds_to(when), call)
        timer.daemon = True
        timer.start()
        return timer

    def poll(self, poller: Polls, seconds: float) -> list[tuple[Any, int]]:
        """What is ready of what the poller watches; empty when the time is over first."""
        return poller.poll(max(0, int(seconds * 1000 + 0.999)))


SYSTEM_CLOCK: Final = Clock()


def seconds_to_wait(verb: str, seconds: Any, default: float | None = None) -> float:
    """What `verb` waits when `seconds` were given to it: nothing where they are negative, and at most a day.

    None stands for the default, where the verb has one.

    Raises:
        RequestError: they are no number.
    """
    if seconds is None and default is not None:
        return default
    given: Any = seconds
    if isinstance(seconds, numbers.Real) and not isinstance(seconds, bool):
        if given >= LONGEST_SECONDS:
            return LONGEST_SECONDS
        if given < LONGEST_SECONDS:  # not so with what is no number, "nan"
            return max(float(given), 0.0)
    raise RequestError(f"{verb}: the time to wait is {seconds!r}; give a number of seconds")
