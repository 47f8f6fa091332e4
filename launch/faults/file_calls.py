"""Calls for files, folders and descriptors, with the faces of `os`, `pathlib`, `fcntl`, `tempfile` and `shutil`."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, Self, cast

from fastdeploy_cache.launch.faults.disk import File, OpenDiskFile, status_of
from fastdeploy_cache.launch.faults.machine import Machine, SimulatedProcess
from fastdeploy_cache.launch.faults.namespaces import Namespace
from fastdeploy_cache.launch.faults.open_files import (
    Counter,
    LogFile,
    Memory,
    OpenFile,
    PipeReader,
    ProcessWatch,
    SameMemory,
)
from fastdeploy_cache.launch.faults.scheduler import FOREVER
from fastdeploy_cache.launch.faults.trouble import Trouble, broken, system_error

_STORE = "/store"
_MOST_MEMORY_KB, _LITTLE_MEMORY_KB = 2**30, 1


class FileCalls:
    """What the current actor's process asks of the system about files."""

    def __init__(self, machine: Machine, trouble: Trouble) -> None:
        self._machine, self._scheduler, self._disk = machine, machine.scheduler, machine.disk
        self._trouble, self._chance = trouble, machine.scheduler.chance
        self.num_calls = 0

    @property
    def _process(self) -> SimulatedProcess:
        return self._machine.caller

    # -- trouble

    def file_call(self, path: str = _STORE) -> None:
        """A step; the disk may be slow, or broken: that of the store, and not the one of temporary files."""
        self.num_calls += 1
        self._scheduler.step("file")
        if not path.startswith(_STORE):
            return
        if self._trouble.fails(self._trouble.disk_slow_share, self._chance):
            until = self._scheduler.now + self._trouble.disk_slow_seconds
            self._scheduler.wait((), lambda: False, until, "slow")
        if self._trouble.fails(self._trouble.disk_error_share, self._chance):
            raise broken()

    def _write_call(self) -> None:
        self.file_call()
        if self._trouble.disk_is_full:
            raise system_error(errno.ENOSPC)

    def install(self, file: OpenFile) -> int:
        """A new descriptor of the process."""
        return self._process.install(file)

    # -- descriptors

    def close(self, fd: int) -> None:
        """No step. What is closed twice is noted: another thread may have got the number meanwhile."""
        process = self._machine.process
        if process is None or process.is_dead:
            return
        try:
            process.close(fd)
        except OSError:
            self._machine.wrong_closes.append(f"{process.name} closes {fd}, which it does not have")
            raise

    def open(self, path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        """See open(2); knows /proc/PID/fd."""
        text = os.fspath(path)
        if text.startswith("/proc/"):
            _, _, pid, _, number = text.split("/")
            owner = self._process if pid == "self" else self._machine.processes.get(int(pid))
            if owner is None or owner.is_dead or int(number) not in owner.descriptors:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), text)
            file = owner.descriptors[int(number)]
            assert isinstance(file, Memory | SameMemory)
            return self.install(SameMemory(file if isinstance(file, Memory) else file.memory))
        self.file_call(text)
        if flags & os.O_CREAT and self._trouble.disk_is_full:
            raise system_error(errno.ENOSPC)
        return self.install(self._disk.open(text, flags))

    def fstat(self, fd: int) -> SimpleNamespace:
        """See fstat(2)."""
        file = self._process.file(fd)
        if isinstance(file, OpenDiskFile):
            return status_of(cast("File", file.entry))
        return SimpleNamespace(st_size=file.size, st_ino=file.inode, st_dev=2, st_uid=os.geteuid(), st_mode=0o100600)

    def fdopen(self, fd: int, mode: str = "rb") -> io.BytesIO:
        """A memfd, to read."""
        assert mode == "rb"
        file = self._process.file(fd)
        assert isinstance(file, Memory)
        calls = self

        class Opened(io.BytesIO):
            def close(self) -> None:
                if not self.closed:
                    calls.close(fd)
                super().close()

        return Opened(file.read())

    # -- bytes

    def _file(self, fd: int) -> File:
        file = self._process.file(fd)
        if not isinstance(file, OpenDiskFile) or not isinstance(file.entry, File):
            raise system_error(errno.EINVAL)
        return file.entry

    def read(self, fd: int, num_bytes: int) -> bytes:
        """See read(2); of a pipe, and waits for what comes."""
        file = self._process.file(fd)
        assert isinstance(file, PipeReader)
        self._scheduler.wait(file.sources(), file.is_readable, FOREVER, "wait")
        return file.take(num_bytes)

    def write(self, fd: int, data: bytes | memoryview) -> int:
        """See write(2); into a memfd."""
        file = self._process.file(fd)
        assert isinstance(file, Memory)
        return file.write(data)

    def pread(self, fd: int, num_bytes: int, offset: int) -> bytes:
        """See pread(2); of a log."""
        file = self._process.file(fd)
        assert isinstance(file, LogFile)
        return bytes(file.data[offset : offset + num_bytes])

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See preadv(2)."""
        self.file_call()
        data, num_read = self._file(fd).data, 0
        for buffer in buffers:
            piece = data[offset + num_read : offset + num_read + buffer.nbytes]
            if piece and self._trouble.fails(self._trouble.disk_flip_share, self._chance):
                piece[self._chance.randrange(len(piece))] ^= 1 << self._chance.randrange(8)
            buffer.cast("B")[: len(piece)] = piece
            num_read += len(piece)
            if len(piece) < buffer.nbytes:
                break
        return num_read

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """See pwritev(2); writes a part now and then, as it may."""
        self._write_call()
        data = b"".join(bytes(buffer) for buffer in buffers)
        if len(data) > 1 and self._chance.random() < 0.02:
            data = data[: self._chance.randrange(1, len(data))]
        return self._disk.write(self._file(fd), data, offset)

    def posix_fallocate(self, fd: int, offset: int, num_bytes: int) -> None:
        """See posix_fallocate(3)."""
        if isinstance(self._process.file(fd), Memory):
            if self._trouble.has_no_memory:
                raise system_error(errno.ENOSPC)
            return
        self._write_call()
        file = self._file(fd)
        if len(file.data) < offset + num_bytes:
            self._disk.resize(file, offset + num_bytes)

    def ftruncate(self, fd: int, size: int) -> None:
        """See ftruncate(2)."""
        file = self._process.file(fd)
        if isinstance(file, Memory):
            file.resize(size)
            return
        self._write_call()
        self._disk.resize(self._file(fd), size)

    def fsync(self, fd: int) -> None:
        """See fsync(2), and fdatasync(2)."""
        self.file_call()
        file = self._process.file(fd)
        assert isinstance(file, OpenDiskFile)
        if not self._trouble.disk_lies:
            cast("File", file.entry).sync()

    # -- others

    def eventfd(self, value: int, flags: int = 0) -> int:
        """See eventfd(2)."""
        counter = Counter()
        counter.value = value
        return self.install(counter)

    def eventfd_read(self, fd: int) -> int:
        """See eventfd_read(3)."""
        self._scheduler.step("message")
        counter = self._process.file(fd)
        assert isinstance(counter, Counter)
        return counter.take()

    def eventfd_write(self, fd: int, value: int) -> None:
        """See eventfd_write(3)."""
        self._scheduler.step("message")
        counter = self._process.file(fd)
        assert isinstance(counter, Counter)
        counter.add(value)

    def memfd_create(self, name: str, flags: int = 0) -> int:
        """See memfd_create(2)."""
        return self.install(Memory(self._machine.new_inode(), name))

    def pidfd_open(self, pid: int, flags: int = 0) -> int:
        """See pidfd_open(2)."""
        return self.install(self._machine.watch(pid))

    def pidfd_send_signal(self, fd: int, number: int) -> None:
        """SIGKILL, which is all that is sent."""
        watch = self._process.file(fd)
        assert isinstance(watch, ProcessWatch) and number == 9
        if watch.process.is_dead:
            raise ProcessLookupError(errno.ESRCH, os.strerror(errno.ESRCH))
        self._machine.signal_death(watch.process)

    def exit(self, status: int) -> None:
        """See _exit(2)."""
        self._machine.end(self._process, status)
        self._scheduler.check_alive()

    def getppid(self) -> int:
        """The process that has started this one; 1 where it is gone."""
        parent = self._process.parent
        return parent.pid if parent is not None and not parent.is_dead else 1

    def flock(self, fd: int, kind: int) -> None:
        """See flock(2), without waiting."""
        self._scheduler.step("file")
        file = self._process.file(fd)
        assert isinstance(file, OpenDiskFile) and kind & fcntl.LOCK_NB
        if not file.lock(is_shared=bool(kind & fcntl.LOCK_SH)):
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    def temporary(self, *_: Any, **__: Any) -> _Temporary:
        """A file without a name."""
        return _Temporary(self, self.install(LogFile()))

    def make_temporary_folder(self, suffix: str = "", prefix: str = "tmp", dir: str = "/tmp") -> str:  # noqa: S108
        """See `tempfile.mkdtemp`."""
        path = f"{dir}/{prefix}{self._machine.new_inode()}"
        self.file_call(path)
        self._disk.make_folder(path)
        return path

    def remove_tree(self, path: Any, *, ignore_errors: bool = False) -> None:
        """See `shutil.rmtree`."""
        text = os.fspath(path)
        self.file_call(text)
        try:
            for name in self._disk.list(text):
                self._disk.remove(f"{text}/{name}")
            self._disk.remove_folder(text)
        except OSError:
            if not ignore_errors:
                raise

    def virtual(self, path: str) -> str:
        """The text of a file below /proc or /sys. Raises `FileNotFoundError`."""
        if path == "/proc/meminfo":
            return f"MemAvailable: {_LITTLE_MEMORY_KB if self._trouble.has_no_memory else _MOST_MEMORY_KB} kB\n"
        parts = path.split("/")
        if parts[1] == "proc" and parts[-1] == "stat" and parts[2].isdigit():
            process = self._machine.processes.get(int(parts[2]))
            if process is not None:
                return f"{parts[2]} (simulated) S {' '.join('0' * 18)} {process.started_ticks} 0"
        if path == "/proc/sys/kernel/random/boot_id":
            return "simulated\n"
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def namespaces(self) -> dict[str, Any]:
        """The modules whose place they take, by name."""
        calls: dict[str, Callable[..., Any]] = {
            name: getattr(self, name)
            for name in (
                "close", "open", "fstat", "fdopen", "read", "write", "pread", "preadv", "pwritev", "posix_fallocate",
                "ftruncate", "fsync", "eventfd", "eventfd_read", "eventfd_write", "memfd_create", "pidfd_open",
                "getppid",
            )
        }  # fmt: skip
        real = ("path", "PathLike", "fsencode", "fspath", "strerror", "geteuid", "getuid", "stat_result", "environ")
        return {
            "os": Namespace(
                os,
                {
                    **calls,
                    "fdatasync": self.fsync,
                    "_exit": self.exit,
                    "getpid": lambda: self._process.pid,
                    "set_inheritable": lambda *_: None,
                    "sched_getaffinity": lambda _: {0, 1},
                },
                real,
            ),
            "fcntl": Namespace(fcntl, {"flock": self.flock}),
            "tempfile": Namespace(
                tempfile,
                {
                    "TemporaryFile": self.temporary,
                    "mkdtemp": self.make_temporary_folder,
                    "gettempdir": lambda: "/tmp",  # noqa: S108
                },
            ),
            "shutil": Namespace(shutil, {"which": lambda _: None, "rmtree": self.remove_tree}),
        }


class _Temporary:
    """What `tempfile.TemporaryFile` gives."""

    def __init__(self, calls: FileCalls, fd: int) -> None:
        self._calls, self._fd = calls, fd

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
