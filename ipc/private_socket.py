"""A unix socket that only its own user can reach, and lines of bounded size over it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.ipc.shortage import AcceptRests

_BACKLOG = 8
_MOST_AT_ONCE = 2**18
_UCRED = struct.Struct("3i")  # pid, uid, gid; unix(7)


class PrivateListener:
    """Listens at `path`, mode 0600, in a folder of mode 0700 that is made where there is none.

    Who gets through is asked for his user id all the same (`peer_uid`).
    """

    def __init__(self, path: Path) -> None:
        """A file that a killed server left there is replaced.

        Raises:
            IPCError: a server listens there, others may enter the folder, or something else is in the way.
        """
        self._name, self._ended, self._rests = path.name, SYSTEM_CLOCK.event(), AcceptRests(str(path))
        self._folder = _open_private_folder(path.parent)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(None)  # whatever the program's default is: it waits for who connects
        try:
            self._listen(path)
        except OSError as error:
            self._close_handles()
            raise IPCError(f"cannot listen on {path}: {error.strerror or error}") from error
        except BaseException:
            self._close_handles()
            raise

    def _listen(self, path: Path) -> None:
        """One server at a time.

        Without the lock two that start at once may both find a dead socket; the first replaces it and listens, then
        the second removes the first one's.
        """
        try:
            fcntl.flock(self._folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise IPCError(f"another server is starting in {path.parent}; try again") from None
        address = _address(self._folder, self._name)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(self._stat().st_mode):
                raise IPCError(f"{path} is there and is no socket; choose another path, or remove it")
            if _is_served(address):
                raise IPCError(f"a server listens on {path} already; stop it, or choose another path")
            os.unlink(self._name, dir_fd=self._folder)
        self._socket.bind(address)  # whatever its mode is until the next line, nobody else can enter the folder
        os.chmod(self._name, 0o600, dir_fd=self._folder)
        self._socket.listen(_BACKLOG)
        self._inode = self._stat().st_ino
        fcntl.flock(self._folder, fcntl.LOCK_UN)

    def accept(self) -> socket.socket | None:
        """The next connection; None after `end`.

        Where the process has no descriptor or no memory left for it now, whoever connects waits until it has.
        """
        while True:
            try:
                connection = self._socket.accept()[0]
            except OSError as error:
                if self._ended.is_set():
                    return None
                self._ended.wait(self._rests.met(error))
            else:
                self._rests.over()
                return connection

    def end(self) -> None:
        """`accept` returns None; who connects from now on is refused."""
        self._ended.set()
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Remove the file, unless it is another server's by now. Safe to call twice."""
        if self._folder < 0:
            return
        with contextlib.suppress(FileNotFoundError):
            if self._stat().st_ino == self._inode:
                os.unlink(self._name, dir_fd=self._folder)
        self._close_handles()

    def _stat(self) -> os.stat_result:
        return os.stat(self._name, dir_fd=self._folder, follow_symlinks=False)

    def _close_handles(self) -> None:
        self._socket.close()
        os.close(self._folder)
        self._folder = -1


@contextlib.contextmanager
def connected(path: Path, timeout_seconds: float) -> Iterator[socket.socket]:
    """A connection to the listener at `path`.

    Raises:
        FileNotFoundError, ConnectionRefusedError: nobody listens there.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(timeout_seconds)
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            connection.connect(_address(folder, path.name))
        finally:
            os.close(folder)
        yield connection


def peer_uid(connection: socket.socket) -> int:
    """The user of the process at the other end, as the kernel noted it when it connected or began to listen."""
    return int(_UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))[1])


def receive_line(connection: socket.socket, timeout_seconds: float, max_bytes: int) -> bytes | None:
    """One line without its end; None where the peer says nothing at all.

    Raises:
        TimeoutError: not whole within the time.
        IPCError: too long, more than one, or without an end.
    """
    deadline, data = SYSTEM_CLOCK.now() + timeout_seconds, bytearray()
    while not data.endswith(b"\n"):
        connection.settimeout(max(1e-6, deadline - SYSTEM_CLOCK.now()))
        try:
            more = connection.recv(min(max_bytes, _MOST_AT_ONCE))
        except TimeoutError:
            raise TimeoutError(f"no whole line within {timeout_seconds:g} s") from None
        data += more
        if len(data) > max_bytes or b"\n" in memoryview(data)[-len(more) - 1 : -1].tobytes():
            raise IPCError(f"received more than one line of {max_bytes} bytes; send one, and no longer")
        if not more:
            if data:
                raise IPCError("received a line without an end; end it with a newline")
            return None
    return bytes(data[:-1])


def _address(folder: int, name: str) -> str:
    """The path by the folder's descriptor: an address holds 107 bytes, a path may be longer."""
    return f"/proc/self/fd/{folder}/{name}"


def _is_served(address: str) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(address)
        except ConnectionRefusedError:
            return False
        except BlockingIOError:  # so many wait for it that there is no room for one more
            return True
    return True


def _open_private_folder(folder: Path) -> int:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise IPCError(f"cannot make the folder {folder}: {error.strerror}") from error
    found = os.fstat(fd)
    if found.st_uid != os.geteuid() or found.st_mode & 0o077:
        os.close(fd)
        raise IPCError(
            f"the folder {folder} is of user {found.st_uid} with mode {stat.S_IMODE(found.st_mode):o}, open to others; "
            "use one of your own with mode 700, or one that does not exist yet"
        )
    return fd
