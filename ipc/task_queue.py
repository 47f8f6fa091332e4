"""The queue between an engine and one incarnation of a rank: tasks one way, results back, in numbered lanes.

Each incarnation gets a socket of its own in a fresh 0700 directory, so a new process can never receive an old one's
tasks. Once the rank has spoken, `TaskQueue.hide` unlinks both: the connection stays, and a killed engine leaves none.
ZeroMQ does not announce a peer's death; whoever owns the process watches that.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Hashable
from typing import Any, Protocol

import zmq

from fastdeploy_cache.errors import IPCError, QueueDisconnectedError, QueueFullError
from fastdeploy_cache.ipc.private_directory import PrivateDirectory

_MAX_LANES = 8


class TaskQueue:
    """The engine's end: binds, knows the lanes of one peer, never blocks. One thread at a time."""

    def __init__(self, context: zmq.Context[Any], max_messages: int) -> None:
        """Bind a ROUTER in a private directory; `max_messages` may wait in each lane, each way."""
        self._names = [_name(lane) for lane in range(_MAX_LANES)]
        self._directory = PrivateDirectory()
        self.address = f"ipc://{self._directory.path}/queue"
        try:
            self.socket = context.socket(zmq.ROUTER)
        except zmq.ZMQError as error:
            self.hide()
            raise IPCError(f"cannot make a socket: {error}; raise the limit of open files") from error
        # Without it a message to a lane that has gone, or is full, would be dropped without a word, and the task behind
        # it would wait for its deadline.
        self.socket.set(zmq.ROUTER_MANDATORY, 1)
        # What a rank has not read when its queue closes is void: nobody is left to read it, and a close that lingered
        # for it would hold up the engine's end.
        self.socket.set(zmq.LINGER, 0)
        self.socket.set_hwm(max_messages)
        try:
            self.socket.bind(self.address)
        except zmq.ZMQError as error:
            self.close()
            raise IPCError(f"cannot bind {self.address}: {error}; is the temporary folder writable?") from error

    def put(self, message: bytes, lane: int = 0) -> None:
        """Queue a message in a lane.

        Raises:
            QueueFullError: the peer holds `max_messages` unread ones.
            QueueDisconnectedError: no peer has connected, or it is gone.
        """
        try:
            self.socket.send(self._names[lane], zmq.NOBLOCK | zmq.SNDMORE)
            self.socket.send(message, zmq.NOBLOCK)
        except zmq.Again as error:
            raise QueueFullError("the rank has not read its earlier tasks") from error
        except zmq.ZMQError as error:
            raise QueueDisconnectedError(f"no rank is connected to {self.address}: {error}") from error

    def get(self) -> bytes | None:
        """The next message, or None when there is none."""
        if not self.socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
            return None
        self.socket.recv()  # the lane's name
        message: bytes = self.socket.recv()
        return message

    def hide(self) -> None:
        """Remove the socket's path and directory; the connected peer stays connected. Safe to call twice."""
        self._directory.remove()

    def close(self) -> None:
        """Drop the socket and everything unread. Safe to call twice."""
        self.socket.close()
        self.hide()


def _name(lane: int) -> bytes:
    return b"lane%d" % lane


class RankQueue:
    """The rank's end of one lane: connects to the address that it was given. One thread at a time."""

    def __init__(self, address: str, max_messages: int, lane: int = 0) -> None:
        # A context for each lane: its thread closes it at its own end, while the other lane may still send.
        self._context: zmq.Context[Any] = zmq.Context(io_threads=1)
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.set(zmq.ROUTING_ID, _name(lane))
        self.socket.set(zmq.LINGER, 1000)  # or an answer that was put just before the end would be lost with it
        self.socket.set_hwm(max_messages)
        self.socket.connect(address)

    def get(self) -> bytes:
        """The next message. Waits without limit: the caller's process ends with the engine's."""
        return self.socket.recv()

    def get_now(self) -> bytes | None:
        """The next message, or None when there is none."""
        try:
            return self.socket.recv(zmq.NOBLOCK)
        except zmq.Again:
            return None

    def put(self, message: bytes) -> None:
        """Queue a message to the engine."""
        self.socket.send(message)

    def close(self) -> None:
        """Send what is queued (for a second at most) and disconnect."""
        self.socket.close()
        self._context.term()


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


class HasSocket(Protocol):
    """A queue, or another end of a connection, that can be waited for."""

    socket: zmq.Socket[Any]


class Poller:
    """Waits for queues and plain descriptors together. One thread at a time."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._keys: dict[Any, Hashable] = {}

    def register(self, source: HasSocket | int, key: Hashable) -> None:
        """Report `key` when `source` (a queue, or a readable descriptor) has something."""
        handle = source if isinstance(source, int) else source.socket
        self._poller.register(handle, zmq.POLLIN)
        self._keys[handle] = key

    def unregister(self, source: HasSocket | int) -> None:
        """Stop watching `source`; before it is closed."""
        handle = source if isinstance(source, int) else source.socket
        self._poller.unregister(handle)
        del self._keys[handle]

    def wait(self, timeout_seconds: float) -> list[Hashable]:
        """The keys of what is ready; empty when the time is over first."""
        ready = self._poller.poll(max(0, int(timeout_seconds * 1000 + 0.999)))
        return [self._keys[handle] for handle, _ in ready]


def new_context() -> zmq.Context[Any]:
    """The ZeroMQ context for one engine-side owner of queues."""
    return zmq.Context(io_threads=1)
