"""A clock that only the test moves: nothing that is asked to wait by it ever sleeps."""

from __future__ import annotations

import heapq
import itertools
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import zmq

from fastdeploy_cache.ipc.clock import Clock

_STUCK_SECONDS = 30.0  # of real time: nobody has moved the clock, or set what is waited for


class ManualEvent:
    """See `fastdeploy_cache.ipc.clock.Event`; a wait ends when it is set, or when the test has moved the clock far
    enough."""

    def __init__(self, clock: ManualClock) -> None:
        self._clock, self._is_set = clock, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        with self._clock.moved:
            self._is_set = True
            self._clock.moved.notify_all()

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float) -> bool:
        return self._clock.wait_until(lambda: self._is_set, timeout)


@dataclass(order=True)
class ManualAlarm:
    """See `fastdeploy_cache.ipc.clock.Alarm`; made by the thread that moves the clock."""

    when: float
    number: int
    call: Callable[[], object] = field(compare=False)
    is_cancelled: bool = field(default=False, compare=False)

    def cancel(self) -> None:
        self.is_cancelled = True

    def join(self, timeout: float) -> None:
        """It is made before `advance` returns."""


class _Polling:
    """A thread that polls, and a descriptor that ends its wait."""

    def __init__(self) -> None:
        self.waker, self.thread = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), threading.current_thread()
        self.is_idle = False  # it has found nothing to do since the clock was moved

    @property
    def is_settled(self) -> bool:
        return self.is_idle or not self.thread.is_alive()


class ManualClock(Clock):
    """Any thread may wait; one moves it."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self._seconds, self.moved, self._num_waiting = 1000.0, threading.Condition(), 0
        self._alarms: list[ManualAlarm] = []
        self._numbers = itertools.count()
        self._polling: dict[int, _Polling] = {}  # by poller
        self.now = self.age = lambda: self._seconds
        self.unix = lambda: 1.6e9 + self._seconds
        self.event = lambda: ManualEvent(self)
        self.sleep = self._sleep
        self.random_bytes = random.Random(seed).randbytes

    def advance(self, seconds: float) -> None:
        """Move it; calls that are due meanwhile are made at their time, one after the other."""
        end = self._seconds + seconds
        while (alarm := self._next_before(end)) is not None:
            self._move_to(max(self._seconds, alarm.when))
            if not alarm.is_cancelled:
                alarm.call()
        self._move_to(end)

    def _next_before(self, end: float) -> ManualAlarm | None:
        with self.moved:
            return heapq.heappop(self._alarms) if self._alarms and self._alarms[0].when <= end else None

    def _sleep(self, seconds: float) -> None:
        self.wait_until(lambda: False, seconds)

    def _move_to(self, seconds: float) -> None:
        with self.moved:
            self._seconds = seconds
            self.moved.notify_all()
            for polling in self._polling.values():
                polling.is_idle = False
                os.eventfd_write(polling.waker, 1)
            all_idle = self.moved.wait_for(
                lambda: all(each.is_settled for each in self._polling.values()), _STUCK_SECONDS
            )
            assert all_idle, "a thread that polls by this clock does not come back to it"

    def wait_until(self, is_over: Callable[[], bool], seconds: float) -> bool:
        """Whether it is over before the clock has gone on so far."""
        with self.moved:
            deadline = self._seconds + seconds
            self._num_waiting += 1
            self.moved.notify_all()
            try:
                ended = self.moved.wait_for(lambda: is_over() or self._seconds >= deadline, _STUCK_SECONDS)
            finally:
                self._num_waiting -= 1
            assert ended, "nobody has moved the clock, or set what is waited for"
            return is_over()

    def wait_for_waiters(self, num_waiting: int) -> None:
        """Return once so many threads wait by this clock for something that has not come."""
        with self.moved:
            assert self.moved.wait_for(lambda: self._num_waiting >= num_waiting, _STUCK_SECONDS)

    def call_at(self, when: float, call: Callable[[], object]) -> ManualAlarm:
        alarm = ManualAlarm(when, next(self._numbers), call)
        with self.moved:  # a comparison of two alarms is Python, in which another thread may come between
            heapq.heappush(self._alarms, alarm)
        return alarm

    def poll(self, poller: Any, seconds: float) -> list[tuple[Any, int]]:
        with self.moved:
            deadline, polling = self._seconds + seconds, self._polling.get(id(poller))
            if polling is None:
                polling = self._polling[id(poller)] = _Polling()
                poller.register(polling.waker, zmq.POLLIN)
        while True:
            found = poller.poll(0)
            if not found and self._seconds < deadline:
                with self.moved:
                    polling.is_idle = True
                    self.moved.notify_all()
                found = poller.poll(int(_STUCK_SECONDS * 1000))
            ready = [(handle, events) for handle, events in found if handle != polling.waker]
            if len(ready) < len(found):
                os.eventfd_read(polling.waker)
            if ready or self._seconds >= deadline:
                return ready

    def close(self) -> None:
        """Give its descriptors back; whoever has polled by it has ended."""
        for polling in self._polling.values():
            os.close(polling.waker)
        self._polling.clear()
        self._alarms.clear()
