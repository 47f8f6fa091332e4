"""One incarnation of a rank as an operating-system process."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import IO

from fastdeploy_cache.ipc.private_directory import temporary_folder
from fastdeploy_cache.ipc.shortage import is_shortage
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup, memory_of, say_setup

_TAIL_BYTES = 2000
_TRY_SECONDS = 5.0


class ChildProcess:
    """Started, watched through its pid descriptor, killed, reaped. Used by the thread that created it.

    That thread must live as long as the process may: the kernel kills the rank when the spawning thread ends.
    """

    def __init__(
        self,
        setup: ProcessSetup,
        config: TransferConfig,
        fds: tuple[int, ...],
        program: str = "fastdeploy_cache.transfer_manager",
    ) -> None:
        """Spawn the module `program` and hand over its set-up; it inherits `fds`.

        Raises:
            OSError: the interpreter or the log folder cannot be used, or there are no descriptors left for it.
        """
        command = [*_die_with_parent(), sys.executable, "-P", "-m", program]
        command += ["--rank", str(setup.rank), "--incarnation", str(setup.incarnation)]  # for whoever reads `ps`
        self._log = _open_log(config, setup.rank, program)
        self._log_start = os.fstat(self._log.fileno()).st_size
        with contextlib.ExitStack() as undo:
            undo.callback(self._log.close)
            setup_fd = memory_of(setup)
            undo.callback(os.close, setup_fd)
            self._popen = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **setup.variables},
                pass_fds=(*fds, setup_fd),
                start_new_session=True,  # a signal to the engine's process group is the engine's to deal with
            )
            os.close(setup_fd)
            undo.pop_all()
        assert self._popen.stdin is not None
        self.pid = self._popen.pid
        try:
            self.pidfd = os.pidfd_open(self.pid)
        except OSError:  # nobody could watch it: it has not been
            self._popen.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_TRY_SECONDS)
            self._popen.stdin.close()
            self._log.close()
            raise
        with contextlib.suppress(BrokenPipeError):  # it died already: its pid descriptor tells
            say_setup(self._popen.stdin, setup_fd)  # type: ignore[arg-type]

    def kill(self) -> None:
        """SIGKILL, which also ends a stopped process. It is gone only when `reap` says so."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def reap(self) -> int | None:
        """The exit code (negative: the signal) once the process is gone, else None. Never waits."""
        return self._popen.poll()

    def log_tail(self) -> str:
        """The end of what this incarnation has written to its log."""
        fd = self._log.fileno()
        size = os.fstat(fd).st_size
        start = max(self._log_start, size - _TAIL_BYTES)
        return os.pread(fd, size - start, start).decode(errors="replace").strip()

    def close(self) -> None:
        """Give the descriptors back; after `reap` returned a code."""
        assert self._popen.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._popen.stdin.close()
        os.close(self.pidfd)
        self._log.close()


def _die_with_parent() -> list[str]:
    """What to start a program with, so that the kernel kills it when the thread that starts it ends.

    The program asks for that itself, too, but only once it runs: stopped before, while its interpreter starts, it would
    outlive a killed engine and hold the memory that it has inherited. `setpriv` (util-linux) asks first and then
    becomes the program. Where it is missing, or too old to know that, the time until the program runs stays open.
    """
    setpriv = shutil.which("setpriv")
    try:
        return [setpriv, "--pdeathsig", "KILL", "--"] if setpriv is not None and _can_arm(setpriv) else []
    except subprocess.TimeoutExpired:  # a busy machine: it is asked again the next time
        return []


@functools.cache
def _can_arm(setpriv: str) -> bool:
    """Whether this `setpriv` knows the option; tried once. A shortage, or a machine that is too busy to answer, says
    nothing of that, and is raised."""
    command = [setpriv, "--pdeathsig", "KILL", "--", "true"]
    try:
        return subprocess.run(command, capture_output=True, timeout=_TRY_SECONDS, check=False).returncode == 0
    except OSError as error:
        if is_shortage(error):
            raise
        return False


def _open_log(config: TransferConfig, rank: int, program: str) -> IO[bytes]:
    if config.log_dir is None:
        return tempfile.TemporaryFile(dir=temporary_folder())
    directory = Path(config.log_dir)
    directory.mkdir(parents=True, exist_ok=True)
    kind = program.rpartition(".")[2].removesuffix("_manager")
    return open(directory / f"{kind}_dp{config.data_parallel_id}_rank{rank}.log", "a+b")
