"""Calls for messages on one machine, with the faces of `socket`, `select` and ZeroMQ's poller."""

from __future__ import annotations

import select
import socket
from typing import Any, Self

from fastdeploy_cache.launch.faults.file_calls import FileCalls
from fastdeploy_cache.launch.faults.machine import Machine, SimulatedProcess
from fastdeploy_cache.launch.faults.namespaces import Namespace
from fastdeploy_cache.launch.faults.open_files import EventPoll, OpenFile, StreamEnd, all_sources
from fastdeploy_cache.launch.faults.scheduler import FOREVER
from fastdeploy_cache.launch.faults.trouble import Trouble


class MessageCalls:
    """What the current actor's process asks of the system about sockets."""

    def __init__(self, machine: Machine, files: FileCalls, trouble: Trouble, capacity_bytes: int) -> None:
        """`capacity_bytes`: what a socket holds that was not read."""
        self.machine, self.scheduler, self.files, self._trouble = machine, machine.scheduler, files, trouble
        self._capacity_bytes = capacity_bytes
        self.num_messages = self.num_answers = 0

    @property
    def process(self) -> SimulatedProcess:
        """Who calls."""
        return self.machine.caller

    def transit(self) -> float:
        """How long what is sent now is on its way."""
        seconds = self._trouble.message_seconds
        return seconds * self.scheduler.chance.random() if seconds else 0.0

    def socketpair(self) -> tuple[Socket, Socket]:
        """See socketpair(2)."""
        one, other = StreamEnd.pair(self.scheduler, self._capacity_bytes, self.transit)
        return Socket(self, self.files.install(one)), Socket(self, self.files.install(other))

    def namespaces(self) -> dict[str, Any]:
        """The modules whose place they take, by name."""
        return {
            "socket": Namespace(
                socket,
                {
                    "socketpair": self.socketpair,
                    "socket": lambda *, fileno: Socket(self, fileno),
                    "gethostname": lambda: "simulated",
                    "MSG_NOSIGNAL": 0,
                    "MSG_DONTWAIT": int(socket.MSG_DONTWAIT),
                },
            ),
            "select": Namespace(select, {"epoll": lambda: Poll(self), "poll": lambda: DescriptorPoll(self)}),
        }


class Socket:
    """See `socket.socket`; one of a pair."""

    def __init__(self, calls: MessageCalls, fd: int) -> None:
        self._calls, self._fd, self._is_blocking = calls, fd, True

    def setblocking(self, is_blocking: bool) -> None:
        self._is_blocking = is_blocking

    def settimeout(self, seconds: float | None) -> None:
        assert seconds is None
        self._is_blocking = True

    def fileno(self) -> int:
        return self._fd

    def _end(self) -> StreamEnd:
        end = self._calls.process.file(self._fd)
        assert isinstance(end, StreamEnd)
        return end

    def send(self, data: memoryview | bytes, flags: int = 0) -> int:
        calls = self._calls
        calls.num_messages += 1
        calls.scheduler.step("message")
        return self._end().put(data)

    def sendall(self, data: bytes, flags: int = 0) -> None:
        calls, rest = self._calls, memoryview(data)
        calls.num_messages += 1
        calls.num_answers += 1  # only processes of ranks send so
        calls.scheduler.step("message")
        while rest:
            end = self._end()
            if not end.is_writable():
                calls.scheduler.wait(end.sources(), end.is_writable, FOREVER, "wait")
            rest = rest[end.put(rest) :]

    def recv(self, num_bytes: int, flags: int = 0) -> bytes:
        calls, end = self._calls, self._end()
        calls.scheduler.step("message")
        if self._is_blocking and not flags & socket.MSG_DONTWAIT and not end.is_readable():
            calls.scheduler.wait(end.sources(), end.is_readable, FOREVER, "wait")
        return end.take(num_bytes)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.files.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Poll:
    """See `select.epoll`."""

    def __init__(self, calls: MessageCalls) -> None:
        self._calls = calls
        self._poll = EventPoll(calls.scheduler.chance.shuffle)
        self._fd = calls.files.install(self._poll)

    def fileno(self) -> int:
        return self._fd

    def register(self, end: Any, events: int) -> None:
        fd = end.fileno()
        self._poll.watched[fd] = self._calls.process.file(fd), events
        self._poll.waiters.wake()

    modify = register

    def unregister(self, end: Any) -> None:
        del self._poll.watched[end.fileno()]

    def poll(self, timeout: float = 0) -> list[tuple[int, int]]:
        assert timeout == 0
        self._calls.scheduler.check_alive()
        return self._poll.ready()

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.files.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class DescriptorPoll:
    """See `select.poll`; looks only, and waits for nothing."""

    def __init__(self, calls: MessageCalls) -> None:
        self._calls = calls
        self._files: dict[int, OpenFile] = {}

    def register(self, fd: int, events: int) -> None:
        self._files[fd] = self._calls.process.file(fd)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        assert timeout == 0
        self._calls.scheduler.step("message")
        return [(fd, select.POLLIN) for fd, file in self._files.items() if file.is_readable()]


class SimulatedPoller:
    """See `zmq.Poller`: over descriptors, and ZeroMQ's sockets."""

    def __init__(self, calls: MessageCalls) -> None:
        self._calls = calls
        self._sources: dict[Any, OpenFile] = {}

    def register(self, source: Any, flags: int = 1) -> None:
        """Watch it."""
        self._sources[source] = self._calls.process.file(source) if isinstance(source, int) else source.file

    def unregister(self, source: Any) -> None:
        """The reverse."""
        del self._sources[source]

    def poll(self, timeout: int) -> list[tuple[Any, int]]:
        """What can be read, in an order that is drawn; `timeout` in milliseconds."""
        scheduler = self._calls.scheduler
        sources = list(self._sources.items())

        def ready() -> list[tuple[Any, int]]:
            return [(source, 1) for source, file in sources if file.is_readable()]

        deadline = scheduler.now + timeout / 1000
        found: list[tuple[Any, int]] = scheduler.wait(all_sources(file for _, file in sources), ready, deadline, "wait")
        scheduler.chance.shuffle(found)
        return found
