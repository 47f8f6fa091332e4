"""What descriptors of the simulated machine are of, but for files on its disk."""

from __future__ import annotations

import errno
import mmap
import os
import select
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from fastdeploy_cache.launch.faults.scheduler import Scheduler, Waiters


class OpenFile(Protocol):
    """An open file description: processes have it by number, and it ends with the last of these."""

    inode: int = 0
    num_holders: int
    waiters: Waiters

    def __init__(self) -> None:
        self.num_holders = 0
        self.waiters = Waiters()

    def is_readable(self) -> bool:
        """Whether a read would not wait."""
        return False

    def is_writable(self) -> bool:
        """Whether a write would not wait."""
        return True

    def sources(self) -> list[Waiters]:
        """What wakes who waits for a change of `is_readable` or `is_writable`."""
        return [self.waiters]

    @property
    def size(self) -> int:
        """Bytes of it."""
        return 0

    def end(self) -> None:
        """Nobody has it any more."""
        return


class Pipe:
    """Bytes from a write end to a read end."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.reader, self.writer = PipeReader(self), PipeWriter(self)
        self.is_written = self.is_read = True  # whether anybody may


class PipeReader(OpenFile):
    """The end that is read."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def is_readable(self) -> bool:
        return bool(self._pipe.data) or not self._pipe.is_written

    def take(self, num_bytes: int) -> bytes:
        """What is there; empty at the end."""
        data = bytes(self._pipe.data[:num_bytes])
        del self._pipe.data[:num_bytes]
        return data

    def end(self) -> None:
        self._pipe.is_read = False
        self._pipe.writer.waiters.wake()


class PipeWriter(OpenFile):
    """The end that is written."""

    def __init__(self, pipe: Pipe) -> None:
        super().__init__()
        self._pipe = pipe

    def put(self, data: bytes) -> None:
        """Raises `BrokenPipeError` where nobody reads."""
        if not self._pipe.is_read:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        self._pipe.data += data
        self._pipe.reader.waiters.wake()

    def end(self) -> None:
        self._pipe.is_written = False
        self._pipe.reader.waiters.wake()


class Transit(Protocol):
    """How long what is sent now is on its way."""

    def __call__(self) -> float: ...


class StreamEnd(OpenFile):
    """One end of a pair of connected sockets. Bytes come in order, some of them late; Source: unix(7)."""

    def __init__(self, scheduler: Scheduler, capacity_bytes: int, transit: Transit) -> None:
        super().__init__()
        self._scheduler, self._capacity_bytes, self._transit = scheduler, capacity_bytes, transit
        self.peer: StreamEnd | None = None
        self._inbox: deque[tuple[float, bytes]] = deque()  # when it comes
        self._num_bytes = 0
        self._last_arrival = 0.0
        self._is_reset = False
        self.is_open = True

    @staticmethod
    def pair(scheduler: Scheduler, capacity_bytes: int, transit: Transit) -> tuple[StreamEnd, StreamEnd]:
        """Two that are connected."""
        one, other = (StreamEnd(scheduler, capacity_bytes, transit) for _ in range(2))
        one.peer, other.peer = other, one
        return one, other

    @property
    def _has_come(self) -> bool:
        return bool(self._inbox) and self._inbox[0][0] <= self._scheduler.now

    @property
    def is_at_end(self) -> bool:
        """Whether nothing will come any more."""
        return not self._inbox and not (self.peer is not None and self.peer.is_open)

    @property
    def is_hung_up(self) -> bool:
        """Whether the other end is closed, and that is known here: what was sent before comes first."""
        return self.peer is not None and not self.peer.is_open and (self._has_come or not self._inbox)

    def is_readable(self) -> bool:
        return self._has_come or self.is_at_end

    def is_writable(self) -> bool:
        peer = self.peer
        return peer is None or not peer.is_open or peer._num_bytes < self._capacity_bytes

    def sources(self) -> list[Waiters]:
        return [self.waiters, self.peer.waiters] if self.peer is not None else [self.waiters]

    def put(self, data: memoryview | bytes) -> int:
        """Send what there is room for; returns how much. Raises as send(2)."""
        peer = self.peer
        if peer is None or not peer.is_open:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))
        room = self._capacity_bytes - peer._num_bytes
        if room <= 0:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        piece = bytes(data[:room])
        arrival = peer._last_arrival = max(peer._last_arrival, self._scheduler.now + self._transit())
        peer._inbox.append((arrival, piece))
        peer._num_bytes += len(piece)
        if arrival > self._scheduler.now:
            self._scheduler.call_at(arrival, peer.waiters.wake)
        peer.waiters.wake()
        return len(piece)

    def take(self, num_bytes: int) -> bytes:
        """What has come; empty at the end. Raises as recv(2)."""
        if not self._has_come:
            if self._is_reset:
                self._is_reset = False
                raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
            if self.is_at_end:
                return b""
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        taken = bytearray()
        while self._has_come and len(taken) < num_bytes:
            arrival, piece = self._inbox.popleft()
            room = num_bytes - len(taken)
            taken += piece[:room]
            if len(piece) > room:
                self._inbox.appendleft((arrival, piece[room:]))
        self._num_bytes -= len(taken)
        if self.peer is not None:
            self.peer.waiters.wake()  # there is room
        return bytes(taken)

    def end(self) -> None:
        self.is_open = False
        if self.peer is not None:
            self.peer._is_reset |= bool(self._inbox)
            self.peer.waiters.wake()
        self._inbox.clear()


class Counter(OpenFile):
    """An eventfd."""

    def __init__(self) -> None:
        super().__init__()
        self.value = 0

    def is_readable(self) -> bool:
        return self.value > 0

    def add(self, value: int) -> None:
        """Raise it."""
        self.value += value
        self.waiters.wake()

    def take(self) -> int:
        """Its value, and 0 from then on. Raises `BlockingIOError`."""
        if not self.value:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        value, self.value = self.value, 0
        return value


class Memory(OpenFile):
    """A memfd: all who map it share one piece of memory, which is real."""

    def __init__(self, inode: int, name: str) -> None:
        super().__init__()
        self.inode, self.name = inode, name
        self._data = bytearray()
        self._map: mmap.mmap | None = None
        self._size = 0

    @property
    def size(self) -> int:
        return self._size

    def resize(self, num_bytes: int) -> None:
        """Set its size, once."""
        self._size = num_bytes

    def write(self, data: bytes | memoryview) -> int:
        """Add to its end."""
        self._data += data
        self._size = len(self._data)
        return len(data)

    def read(self) -> bytes:
        """All of it."""
        return bytes(self._data)

    def mapping(self) -> mmap.mmap:
        """The memory."""
        if self._map is None:
            self._map = mmap.mmap(-1, max(self._size, 1))
        return self._map


class SameMemory(OpenFile):
    """A memfd that was opened once more, by /proc/PID/fd."""

    def __init__(self, memory: Memory) -> None:
        super().__init__()
        self.memory, self.inode = memory, memory.inode

    @property
    def size(self) -> int:
        return self.memory.size

    def mapping(self) -> mmap.mmap:
        """See `Memory`."""
        return self.memory.mapping()


class ProcessWatch(OpenFile):
    """A pidfd."""

    def __init__(self, is_dead: Callable[[], bool], waiters: Waiters, process: Any) -> None:
        super().__init__()
        self._is_dead, self.waiters, self.process = is_dead, waiters, process

    def is_readable(self) -> bool:
        return self._is_dead()


class LogFile(OpenFile):
    """What a process has written to its standard output."""

    def __init__(self) -> None:
        super().__init__()
        self.data = bytearray()

    @property
    def size(self) -> int:
        return len(self.data)


class EventPoll(OpenFile):
    """An epoll. Reports in an order that is drawn."""

    def __init__(self, shuffle: Callable[[list[Any]], None]) -> None:
        super().__init__()
        self._shuffle = shuffle
        self.watched: dict[int, tuple[OpenFile, int]] = {}

    def ready(self) -> list[tuple[int, int]]:
        """Descriptors and what they are ready for."""
        found = [(fd, _events(file, mask)) for fd, (file, mask) in self.watched.items()]
        found = [each for each in found if each[1]]
        self._shuffle(found)
        return found

    def is_readable(self) -> bool:
        return any(_events(file, mask) for file, mask in self.watched.values())

    def sources(self) -> list[Waiters]:
        return [self.waiters, *all_sources(file for file, _ in self.watched.values())]


def all_sources(files: Iterable[OpenFile]) -> list[Waiters]:
    """What wakes who waits for any of them."""
    return [source for file in files for source in file.sources()]


def _events(file: OpenFile, mask: int) -> int:
    events = 0
    if mask & select.EPOLLIN and file.is_readable():
        events |= select.EPOLLIN
    if mask & select.EPOLLOUT and file.is_writable():
        events |= select.EPOLLOUT
    if isinstance(file, StreamEnd) and file.is_hung_up:
        events |= select.EPOLLHUP
    return events
