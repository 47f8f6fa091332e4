"""Waits for queues, sockets and descriptors together, and lets other threads end such a wait."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable
from typing import Any

import zmq

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock


class Wakeup:
    """Lets other threads end a `Poller.wait`. Any thread may call `set`; the poller's owner calls `clear`."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        # Between `set`'s look at the descriptor and its write, another thread could close it and a third one open a
        # file: it would get the same number, and the write would go there.
        self._lock = threading.Lock()

    def set(self) -> None:
        """Make the poller return now or at its next wait; nothing once closed."""
        with self._lock:
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def clear(self) -> None:
        """Forget earlier calls of `set`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Give the descriptor back. Safe to call twice."""
        with self._lock:
            if self.fd >= 0:
                os.close(self.fd)
            self.fd = -1


class Poller:
    """Waits for ZeroMQ's sockets and plain descriptors together. One thread at a time."""

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._poller, self._poll = zmq.Poller(), clock.poll
        self._keys: dict[Any, Hashable] = {}

    def register(self, source: zmq.Socket[Any] | int, key: Hashable) -> None:
        """Report `key` when `source` (a socket, or a readable descriptor) has something."""
        self._poller.register(source, zmq.POLLIN)
        self._keys[source] = key

    def unregister(self, source: zmq.Socket[Any] | int) -> None:
        """Stop watching `source`; before it is closed."""
        self._poller.unregister(source)
        del self._keys[source]

    def wait(self, timeout_seconds: float) -> list[Hashable]:
        """The keys of what is ready; empty when the time is over first."""
        return [self._keys[source] for source, _ in self._poll(self._poller, timeout_seconds)]
