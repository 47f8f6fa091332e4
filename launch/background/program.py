"""A program of ours in the background: started, watched until it is ready, ended in time."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.background.own_files import open_own
from fastdeploy_cache.launch.background.run_folder import Slot
from fastdeploy_cache.launch.server.readiness import ReadySocket

START_SECONDS, END_SECONDS = 120.0, 30.0
STOP_SECONDS = 3 * END_SECONDS  # of a start that is given up: it ends a supervisor, which ends its members


class EndSignals:
    """SIGTERM and SIGINT as something to wait for, instead of an end in the midst of what is being done.

    The kernel may give a signal to any thread, such as one of a numerical library, and who waits in `select` would not
    wake for it. So the signal itself writes to the descriptor, not the handler, which runs when this thread goes on.
    """

    def __enter__(self) -> Self:
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.is_set = False
        self._old_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        self._old = {number: signal.signal(number, self._note) for number in (signal.SIGTERM, signal.SIGINT)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_fd)
        os.close(self._read)
        os.close(self._write)

    def fileno(self) -> int:
        """A descriptor for `select`: readable once one of them has come."""
        return self._read

    def _note(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self.is_set = True


class Program:
    """`fastdeploy-cache ARGUMENTS` in a session of its own. Its end is seen by its pid descriptor. One thread."""

    def __init__(self, slot: Slot, arguments: Sequence[str], sockets: Path, *, dies_with_us: bool = False) -> None:
        """Start it. `sockets`: a private folder for the socket that it tells its readiness at.

        With `dies_with_us` it gets SIGTERM when the thread that makes this ends.

        Raises:
            LaunchError: it cannot be started.
        """
        self.slot, self.ready = slot, ReadySocket(sockets / f"{slot.name}.ready")
        with contextlib.ExitStack() as undo:
            undo.callback(self.ready.close)
            try:
                if slot.log_file.exists() and slot.log_file.stat().st_size:  # why it died
                    slot.log_file.replace(slot.log_file.with_name(f"{slot.name}.log.old"))
                with open_own(slot.log_file, os.O_WRONLY | os.O_TRUNC) as log:
                    self._popen = subprocess.Popen(
                        [*(_term_with_parent() if dies_with_us else []), *command_of(arguments)],
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        env={**os.environ, "NOTIFY_SOCKET": str(self.ready.path), "PYTHONUNBUFFERED": "1"},
                        start_new_session=True,
                    )
            except OSError as error:
                raise LaunchError(f"{slot.name} cannot be started: {error}") from error
            undo.callback(self._popen.kill)  # nobody would know of it
            self.pid, self.pidfd = self._popen.pid, os.pidfd_open(self._popen.pid)
            slot.note(self.pid)
            undo.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Leave it running where all went well."""
        if kind is not None:
            self.signal(signal.SIGTERM)
            if not wait_ends([self.pidfd], END_SECONDS):
                self.signal(signal.SIGKILL)
            self.reap()
            self.slot.forget()
        self.close()

    def wait_ready(self, seconds: float, asked: EndSignals, say: Callable[[str], None]) -> dict[str, str]:
        """Wait until it says that it is ready; returns what it says. `say` is told what it does until then.

        Raises:
            LaunchError: it has ended, or the time is over.
            KeyboardInterrupt: this process was asked to end meanwhile.
        """
        deadline, said = time.monotonic() + seconds, ""
        while (left := deadline - time.monotonic()) > 0:
            readable, _, _ = select.select([asked.fileno(), self.ready.fileno(), self.pidfd], [], [], left)
            if asked.fileno() in readable:
                raise KeyboardInterrupt
            if self.ready.fileno() in readable:
                if (facts := self.ready.take()) is not None:
                    self.slot.note_facts(facts)
                    return facts
                if self.ready.status != said:
                    said = self.ready.status
                    say(said)
            if self.pidfd in readable:
                raise LaunchError(self.why_ended())
        raise LaunchError(f"{self.slot.name} was not ready within {seconds:.0f} s; its log is {self.slot.log_file}")

    def why_ended(self) -> str:
        """What is known of the end of one that never was ready."""
        return f"{self.slot.name} ended while starting; its log is {self.slot.log_file}\n{self.slot.log_tail()}"

    def signal(self, number: int) -> None:
        """Send it a signal; nothing happens where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, number)

    def reap(self) -> int:
        """The exit code (negative: the signal) of one whose end was seen, or that was killed."""
        return self._popen.wait(END_SECONDS)

    def close(self) -> None:
        """Watch it no more."""
        self.ready.close()
        os.close(self.pidfd)


def command_of(arguments: Sequence[str]) -> list[str]:
    """The command `fastdeploy-cache` of this installation, whatever the path is."""
    return [sys.executable, "-P", "-m", "fastdeploy_cache.launch", *arguments]


def wait_ends(pidfds: Sequence[int], seconds: float) -> bool:
    """Wait until these processes have ended; False when the time is over first."""
    left, deadline = list(pidfds), time.monotonic() + seconds
    while left and (rest := deadline - time.monotonic()) > 0:
        ended, _, _ = select.select(left, [], [], rest)
        left = [each for each in left if each not in ended]
    return not left


def _term_with_parent() -> list[str]:
    """What to start a program with, so that it is asked to end when whoever watches it was killed (util-linux)."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv is not None else []
