"""Calls for processes and their memory, with the faces of `subprocess`, `signal`, `sys`, `ctypes` and `mmap`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

from fastdeploy_cache.errors import NotEnoughMemoryError
from fastdeploy_cache.launch.faults.file_calls import FileCalls
from fastdeploy_cache.launch.faults.machine import Machine, SimulatedProcess
from fastdeploy_cache.launch.faults.namespaces import Namespace
from fastdeploy_cache.launch.faults.open_files import LogFile, Memory, Pipe, PipeWriter, SameMemory
from fastdeploy_cache.launch.faults.scheduler import FOREVER, Waiters
from fastdeploy_cache.launch.faults.trouble import Trouble, system_error

_FUTEX_WAIT = 0
_START_SECONDS = 0.2  # an interpreter takes about so long
_WORKERS = {
    "fastdeploy_cache.transfer_manager": "fastdeploy_cache.transfer_manager.rank.worker",
    "fastdeploy_cache.transfer_manager.storage": "fastdeploy_cache.transfer_manager.storage.worker",
    "fastdeploy_cache.transfer_manager.peer": "fastdeploy_cache.transfer_manager.peer.worker",
}


class ProcessCalls:
    """What the current actor's process asks of the system about processes."""

    def __init__(self, machine: Machine, files: FileCalls, trouble: Trouble) -> None:
        self.machine, self.scheduler, self.files, self.trouble = machine, machine.scheduler, files, trouble
        self._futexes: dict[int, Waiters] = {}
        self._errno = 0

    @property
    def process(self) -> SimulatedProcess:
        """Who calls."""
        return self.machine.caller

    # -- memory that processes share

    def map(self, fd: int, num_bytes: int, *arguments: Any, **keywords: Any) -> mmap.mmap:
        """See mmap(2)."""
        if fd < 0:
            return mmap.mmap(fd, num_bytes, *arguments, **keywords)
        file = self.process.file(fd)
        assert isinstance(file, Memory | SameMemory)
        return file.mapping()  # whole, and for writing, also where less is asked for

    def check_available(self, num_bytes: int, what: str, available_bytes: int | None = None) -> None:
        """See `ipc.memory_limit.check_available`."""
        if self.trouble.has_no_memory and num_bytes:
            raise NotEnoughMemoryError(f"{what} needs {num_bytes} bytes but none are available")

    def _syscall(self, _: Any, address: Any, operation: Any, value: Any, until: Any, *__: Any) -> int:
        """futex(2), which is all that is called so."""
        word = address.value
        waiters = self._futexes.setdefault(word, Waiters())
        if operation.value != _FUTEX_WAIT:
            self.scheduler.step("message")
            waiters.wake()
            return 0
        there = ctypes.c_uint32.from_address(word)
        deadline = FOREVER
        if until is not None:
            deadline = self.scheduler.now + until._obj.tv_sec + until._obj.tv_nsec / 1e9
        # a wake that comes for nothing is allowed, and the caller looks again
        if self.scheduler.wait((waiters,), lambda: there.value != value.value, deadline, "wait"):
            return 0
        self._errno = errno.ETIMEDOUT
        return -1

    def _prctl(self, *_: Any) -> int:
        """PR_SET_PDEATHSIG, which is all that is asked of it."""
        process = self.process
        process.dies_with = process.started_by
        return 0

    # -- processes

    def spawn(
        self,
        command: Sequence[str],
        *,
        stdin: Any = None,
        stdout: Any = None,
        pass_fds: Iterable[int] = (),
        **_: Any,
    ) -> Popen:
        """See `subprocess.Popen`; knows the programs of the transfer manager."""
        self.scheduler.step("spawn")
        if self.trouble.has_no_processes:
            raise system_error(errno.EAGAIN)
        assert stdin == subprocess.PIPE
        return Popen(self, list(command), stdout.fileno(), tuple(pass_fds))

    def run_program(self, process: SimulatedProcess, command: list[str]) -> int:
        """What its interpreter does."""
        scheduler = self.scheduler
        scheduler.wait((), lambda: False, scheduler.now + _START_SECONDS * scheduler.chance.random(), "wait")
        module = command[command.index("-m") + 1]
        process.arguments = ["-m", *command[command.index("-m") + 2 :]]
        from fastdeploy_cache.transfer_manager.process import begin  # late: its names are substituted

        try:
            return begin.begin(_WORKERS[module])
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        except Exception as error:
            self.machine.lines += [f"{process.name}: {line}" for line in traceback.format_exception(error)]
            if process.output is not None:
                process.output.data += f"\n{type(error).__name__}: {error}\n".encode()
            return 1

    def namespaces(self) -> dict[str, Any]:
        """The modules whose place they take, by name."""
        real_types = (
            "c_void_p", "c_int", "c_long", "c_uint32", "c_char", "c_size_t", "byref", "addressof", "Structure",
            "string_at", "memmove", "cast",
        )  # fmt: skip
        library = SimpleNamespace(syscall=self._syscall, prctl=self._prctl)
        return {
            "subprocess": Namespace(subprocess, {"Popen": self.spawn, "STDOUT": subprocess.STDOUT}),
            "signal": Namespace(
                signal,
                {
                    "signal": lambda *_: None,
                    "pidfd_send_signal": self.files.pidfd_send_signal,
                    "SIGKILL": signal.SIGKILL,
                    "SIGINT": signal.SIGINT,
                    "SIG_IGN": signal.SIG_IGN,
                },
            ),
            "sys": _System(self),
            "ctypes": Namespace(
                ctypes,
                {"CDLL": lambda *_, **__: library, "get_errno": lambda: self._errno},
                real_types,
            ),
            "mmap": Namespace(mmap, {"mmap": self.map}),
            "resource": Namespace(
                resource,
                {"getrlimit": lambda _: (self.process.max_descriptors,) * 2, "setrlimit": lambda *_: None},
            ),
        }


class Popen:
    """See `subprocess.Popen`."""

    def __init__(self, calls: ProcessCalls, command: list[str], output_fd: int, pass_fds: tuple[int, ...]) -> None:
        self._calls, parent, machine = calls, calls.process, calls.machine
        passed = [(fd, parent.file(fd)) for fd in pass_fds]  # first: where one is closed, no process is left behind
        pipe, output = Pipe(), parent.file(output_fd)
        assert isinstance(output, LogFile)
        self._stdin_fd = parent.install(pipe.writer)
        program = command[command.index("-m") + 1].rpartition(".")[2]
        holder: list[SimulatedProcess] = []
        self.process = child = machine.begin(program, lambda: calls.run_program(holder[0], command), parent=parent)
        holder.append(child)
        child.output = output
        child.close_all()
        for fd, file in ((0, pipe.reader), (1, output), (2, output), *passed):
            child.install(file, fd)
        self.pid = child.pid
        self.stdin = _Input(calls, self._stdin_fd)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Its exit status, once it has ended."""
        if self.returncode is None and self.process.is_dead:
            self._calls.scheduler.check_alive()
            self.returncode = self.process.exit_status
            self._calls.machine.reap(self.process)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """See `subprocess.Popen.wait`."""
        scheduler = self._calls.scheduler
        deadline = FOREVER if timeout is None else scheduler.now + timeout
        if not scheduler.wait((self.process.ended,), lambda: self.process.is_dead, deadline, "wait"):
            raise subprocess.TimeoutExpired("simulated", timeout or 0.0)
        return self.poll() or 0

    def kill(self) -> None:
        """SIGKILL."""
        self._calls.machine.signal_death(self.process)


class _Input:
    """The standard input of a child."""

    def __init__(self, calls: ProcessCalls, fd: int) -> None:
        self._calls, self._fd = calls, fd

    def write(self, data: bytes) -> None:
        file = self._calls.process.file(self._fd)
        assert isinstance(file, PipeWriter)
        file.put(data)

    def flush(self) -> None:
        """It is not buffered."""

    def fileno(self) -> int:
        return self._fd

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            self._calls.files.close(fd)


class _System:
    """`sys`, as a process of the transfer manager sees it."""

    def __init__(self, calls: ProcessCalls) -> None:
        self._calls = calls
        self.stdin = SimpleNamespace(fileno=lambda: 0)
        self.executable = "python"

    @property
    def argv(self) -> list[str]:
        return self._calls.process.arguments

    def __getattr__(self, name: str) -> Any:
        return getattr(sys, name)
