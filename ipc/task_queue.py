"""The queue between an engine and one incarnation of a rank: tasks one way, results back, in lanes.

Each incarnation gets a pair of sockets of its own for each lane, made by the engine and inherited by the process that
it then starts. They have no name: nobody else can reach them, a new process can never receive an old one's tasks, and
a killed engine leaves nothing. What a shortage of descriptors or memory can refuse is refused here, by an `OSError`,
before the process is there; ZeroMQ accepts and connects in threads of its own, and ends the engine where it cannot.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
from collections import deque

from fastdeploy_cache.errors import CodecError, IPCError, QueueDisconnectedError, QueueFullError

_LENGTH = struct.Struct("<Q")  # of a message, in bytes, before it
# Of a message. The largest: a copy of 2**25 blocks, two numbers of 4 bytes for each, and a look-up of 2**24 blocks of
# one token, a hash of 32 bytes and a token for each. That is 256 and 576 MiB.
_MOST_BYTES = 2**30
_MOST_AT_ONCE = 2**18  # bytes
_LATER = {errno.EAGAIN, errno.ENOBUFS, errno.ENOMEM}  # no room now, for the message or for the kernel's note of it


def _framed(message: bytes) -> bytes:
    """The message with its length in front; one that the other end would take for damage is refused here."""
    if len(message) > _MOST_BYTES:
        raise IPCError(f"a message of {len(message)} bytes is not sent; {_MOST_BYTES} are the most: move fewer blocks")
    return _LENGTH.pack(len(message)) + message


class _Inbox:
    """Whole messages out of the pieces in which they come."""

    def __init__(self) -> None:
        self.data = bytearray()  # what has come, and is taken out again

    def take(self) -> bytes | None:
        """The next message, or None where it is not whole; `CodecError` where none can begin like that."""
        if len(self.data) < _LENGTH.size:
            return None
        (num_bytes,) = _LENGTH.unpack_from(self.data)
        if num_bytes > _MOST_BYTES:
            raise CodecError(f"a message of {num_bytes} bytes is announced; {_MOST_BYTES} are the most")
        end = _LENGTH.size + num_bytes
        if len(self.data) < end:
            return None
        message = bytes(memoryview(self.data)[_LENGTH.size : end])
        del self.data[:end]
        return message


class _EngineLane:
    """The engine's end of one lane: what the rank has no room for yet is kept, and sent later."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.end, self.inbox = end, _Inbox()
        self.unsent: deque[memoryview] = deque()
        self.is_read = self.is_open = True  # at the rank's end: what is put is read; it may still say something

    def send_on(self) -> None:
        """Send what there is room for."""
        while self.unsent:
            message = self.unsent[0]
            try:
                num_sent = self.end.send(message, socket.MSG_NOSIGNAL)
            except OSError as error:
                if error.errno not in _LATER:
                    self.is_read = False  # what it has said before is still there to take
                    self.unsent.clear()
                return
            if num_sent < len(message):
                self.unsent[0] = message[num_sent:]
            else:
                self.unsent.popleft()

    def read(self) -> None:
        """Take what has come."""
        try:
            piece = self.end.recv(_MOST_AT_ONCE)
        except ConnectionError:
            piece = b""
        except OSError as error:
            if error.errno not in _LATER:
                raise
            return
        self.inbox.data += piece
        if not piece:
            self.give_up()

    def give_up(self) -> None:
        """Nothing comes or goes by it any more."""
        self.is_read = self.is_open = False
        self.unsent.clear()


class TaskQueue:
    """The engine's end: knows the lanes of one peer, never blocks. One thread at a time."""

    def __init__(self, num_lanes: int, max_messages: int) -> None:
        """`max_messages` may wait in each lane, beyond what the kernel keeps for it.

        Raises:
            OSError: there are no descriptors, or no memory, for it.
        """
        self._max_messages = max_messages
        self._received: deque[bytes] = deque()
        with contextlib.ExitStack() as undo:
            self._events = undo.enter_context(select.epoll())
            self._lanes: list[_EngineLane] = []
            self._far_ends: list[socket.socket] = []
            for _ in range(num_lanes):
                near, far = map(undo.enter_context, socket.socketpair())
                far.setblocking(True)  # whatever `socket.setdefaulttimeout` says: the process inherits how it is
                self._lanes.append(_EngineLane(near))
                self._far_ends.append(far)
                self._events.register(near, select.EPOLLIN)
            undo.pop_all()
        self._by_fd = {lane.end.fileno(): lane for lane in self._lanes}

    @property
    def fd(self) -> int:
        """A descriptor that is readable when `get` has something to do."""
        return self._events.fileno()

    @property
    def rank_fds(self) -> tuple[int, ...]:
        """The rank's ends, one for each lane, for its process to inherit."""
        return tuple(far.fileno() for far in self._far_ends)

    def hand_over(self) -> None:
        """The process has inherited its ends: keep none of them, so that its death is seen here. Safe to call twice."""
        for far in self._far_ends:
            far.close()

    def put(self, message: bytes, lane: int = 0) -> None:
        """Queue a message in a lane.

        Raises:
            QueueFullError: the peer has not read `max_messages` and more of those before.
            QueueDisconnectedError: the peer is gone.
            IPCError: it is longer than any may be.
        """
        to = self._lanes[lane]
        if len(to.unsent) >= self._max_messages:
            raise QueueFullError("the rank has not read its earlier tasks")
        if to.is_read:
            is_new = not to.unsent
            to.unsent.append(memoryview(_framed(message)))
            if is_new:
                to.send_on()
            self._watch(to)
        if not to.is_read:
            raise QueueDisconnectedError(f"lane {lane} of the rank is closed at its end")

    def get(self) -> bytes | None:
        """The next message, or None when there is none. Meanwhile what waits is sent on.

        Raises:
            CodecError: a lane brought what is no message, and is closed; end the peer. Raised once.
        """
        if not self._received:
            for fd, events in self._events.poll(0):
                self._serve(self._by_fd[fd], events)
        return self._received.popleft() if self._received else None

    def _serve(self, lane: _EngineLane, events: int) -> None:
        if events & select.EPOLLOUT:
            lane.send_on()
        if events & ~select.EPOLLOUT:
            lane.read()
            try:
                while (message := lane.inbox.take()) is not None:
                    self._received.append(message)
            except CodecError:
                lane.give_up()
                raise
            finally:
                self._watch(lane)

    def _watch(self, lane: _EngineLane) -> None:
        if lane.is_open:
            self._events.modify(lane.end, select.EPOLLIN | (select.EPOLLOUT if lane.unsent else 0))
        elif self._by_fd.pop(lane.end.fileno(), None) is not None:  # or its end would be reported for ever
            self._events.unregister(lane.end)

    def close(self) -> None:
        """Drop the sockets and everything unread. Safe to call twice."""
        self.hand_over()
        for lane in self._lanes:
            lane.end.close()
        self._events.close()


class RankQueue:
    """The rank's end of one lane, over a descriptor that its process has inherited. One thread at a time."""

    def __init__(self, fd: int) -> None:
        os.set_inheritable(fd, False)
        self._end, self._inbox = socket.socket(fileno=fd), _Inbox()
        self._end.settimeout(None)  # a store's library may have set another default in this process

    @property
    def fd(self) -> int:
        """A descriptor that is readable when `get_now` has something to do."""
        return self._end.fileno()

    def get(self) -> bytes:
        """The next message. Waits without limit: the caller's process ends with the engine's.

        Raises:
            QueueDisconnectedError: the engine is gone.
            CodecError: what came is no message.
        """
        return self._next(0) or b""

    def get_now(self) -> bytes | None:
        """The next message, or None when there is none. Raises as `get`."""
        return self._next(socket.MSG_DONTWAIT)

    def put(self, message: bytes) -> None:
        """Send a message to the engine, which reads whatever comes. Raises as `get`."""
        try:
            self._end.sendall(_framed(message), socket.MSG_NOSIGNAL)
        except ConnectionError as error:
            raise QueueDisconnectedError(f"the engine does not read any more: {error}") from error

    def close(self) -> None:
        """Disconnect; what was put is still read."""
        self._end.close()

    def _next(self, flags: int) -> bytes | None:
        while (message := self._inbox.take()) is None:
            try:
                piece = self._end.recv(_MOST_AT_ONCE, flags)
            except BlockingIOError:
                return None
            except ConnectionError:
                piece = b""
            if not piece:
                raise QueueDisconnectedError("the engine has closed its end")
            self._inbox.data += piece
        return message
