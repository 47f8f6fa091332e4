"""Where servers in the background keep their things: pid files, logs, sockets, and where they listen."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.background.own_files import check_own_folder, open_own, read_own, write_own
from fastdeploy_cache.launch.background.process_name import name_of, open_process, pid_of

_TAIL_LINES, _TAIL_BYTES = 5, 4000
_MAX_LOCK_BYTES = 100
_MAX_HOLDERS = 3  # starts and stops that a stop outlasts before it gives up


def default_run_folder() -> Path:
    """A folder of this user's own, by the XDG rules."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fastdeploy_cache"


def folder_to_look_in() -> Path:
    """The default folder; that of a checkout's scripts, `run` below the working directory, where a server was started
    from there and none runs from the default one."""
    usual, of_scripts = default_run_folder(), Path("run")
    try:
        is_there = RunFolder(of_scripts).server.pid_file.exists() and RunFolder(usual).server.pid is None
    except LaunchError:  # such as /run, where the working directory is /: it is nobody's run folder
        return usual
    return of_scripts if is_there else usual


@dataclass(frozen=True)
class Slot:
    """The files of one program. It runs while its pid file names a living process."""

    name: str
    folder: Path
    log_folder: Path

    @property
    def pid_file(self) -> Path:
        """Holds the pid and the start time, once it was started."""
        return self.folder / f"{self.name}.pid"

    @property
    def log_file(self) -> Path:
        """What it says; what it said the time before is beside it, as `NAME.log.old`."""
        return self.log_folder / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """The pid, if it runs."""
        return pid_of(self._process_name)

    def open(self) -> int | None:
        """A pid descriptor of the program, if it runs."""
        return open_process(self._process_name)

    @property
    def has_died(self) -> bool:
        """Whether it was started, does not run, and nobody has stopped it: it was killed, or the machine was."""
        return self.pid_file.exists() and self.pid is None

    @property
    def facts(self) -> dict[str, str]:
        """Where it listens: `url`, and `metrics` where it has a port for these. Empty before it was ready."""
        try:
            facts = json.loads(read_own(self._facts_file))
        except (OSError, ValueError, RecursionError):
            return {}
        return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}

    def note(self, pid: int) -> None:
        """It has been started. Raises `LaunchError` where that cannot be written down."""
        with contextlib.suppress(ProcessLookupError):  # it has ended already, which its pid descriptor tells
            _write(self.pid_file, f"{name_of(pid)}\n")

    def note_facts(self, facts: dict[str, str]) -> None:
        """It is ready."""
        _write(self._facts_file, json.dumps(facts) + "\n")

    def forget(self) -> None:
        """It has ended, and nobody starts it again. Raises `LaunchError` where its files cannot be removed."""
        for file in (self.pid_file, self._facts_file):
            try:
                file.unlink(missing_ok=True)
            except OSError as error:
                raise LaunchError(f"{file} cannot be removed: {error.strerror}; remove it by hand") from error

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            text = self.log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    @property
    def _process_name(self) -> str:
        try:
            return read_own(self.pid_file)
        except (OSError, ValueError):
            return ""

    @property
    def _facts_file(self) -> Path:
        return self.folder / f"{self.name}.json"


class RunFolder:
    """One server of its own, and one group, may run from a folder, which is this user's alone."""

    def __init__(self, path: Path) -> None:
        """Raises `LaunchError` where it is there, and another user owns it or may write in it."""
        self.path = path.absolute()
        self.log_folder = self.path / "log"
        self.group_folder = self.path / "prefill_decode"
        self.control_socket = self.path / "control" / "serve.sock"
        self.server = Slot("serve", self.path, self.log_folder)
        self.group = Slot("group", self.group_folder, self.log_folder)  # of who watches the members
        self._check()

    def member(self, name: str) -> Slot:
        """The files of a member of the group."""
        return Slot(name, self.group_folder, self.log_folder)

    @property
    def members(self) -> list[Slot]:
        """Those that have a pid file, the router first."""
        names = sorted(file.stem for file in self.group_folder.glob("*.pid") if file.stem != "group")
        return [self.member(name) for name in sorted(names, key=lambda name: name != "router")]

    def make(self) -> None:
        """Make the folders. Raises `LaunchError` where that cannot be."""
        try:
            for folder in (self.path, self.log_folder, self.group_folder):
                if not folder.is_dir():
                    folder.parent.mkdir(parents=True, exist_ok=True)
                    folder.mkdir(mode=0o755, exist_ok=True)  # others may read: Prometheus does
        except OSError as error:
            raise LaunchError(f"run folder {self.path}: {error}; choose another one with --run-dir") from error
        self._check()

    def _check(self) -> None:
        for folder in (self.path, self.log_folder, self.group_folder):
            check_own_folder(folder)

    @contextlib.contextmanager
    def locked(self, name: str, other: str = "another start or stop is at work") -> Iterator[None]:
        """One start at a time, or whatever else `name` stands for. The lock goes with this process.

        Raises:
            LaunchError: another process has it; `other` says what that does.
        """
        with self._open_lock(name) as file:
            if not _take(file, "start"):
                raise LaunchError(f"{other} in {self.path}")
            yield

    @contextlib.contextmanager
    def locked_to_stop(self, name: str, seconds: float, say: Callable[[str], None]) -> Iterator[None]:
        """The lock of `locked`, for who ends what was started.

        A start that has it is asked to end, and ends what it has started; another stop that has it is waited for. Each
        has so many seconds.

        Raises:
            LaunchError: who has it is there after that time, or cannot be told.
        """
        if not self.path.exists():  # nothing was ever started from here
            yield
            return
        with self._open_lock(name) as file:
            for _ in range(_MAX_HOLDERS):
                if _take(file, "stop"):
                    yield
                    return
                file.seek(0)
                work, _, name = file.read(_MAX_LOCK_BYTES).decode(errors="replace").partition(" ")
                if (pidfd := open_process(name)) is None or not _outlast(pidfd, seconds, ask=work == "start"):
                    break
                say(f"another {work} has ended")
        raise LaunchError(f"another start or stop is at work in {self.path}; try again when it has ended")

    def _open_lock(self, name: str) -> BinaryIO:
        self.make()
        path = self.path / f"{name}.lock"
        try:
            return cast("BinaryIO", open_own(path, os.O_RDWR))  # not emptied: it says who has it
        except OSError as error:
            raise LaunchError(f"{path} cannot be opened: {error.strerror}; remove it by hand") from error


def _write(file: Path, text: str) -> None:
    try:
        write_own(file, text)
    except OSError as error:
        raise LaunchError(f"{file} cannot be written: {error.strerror}; remove it by hand") from error


def _take(file: BinaryIO, work: str) -> bool:
    """Take the lock and write down who has it, and for what; False where another process has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    file.seek(0)
    file.truncate()
    file.write(f"{work} {name_of(os.getpid())}".encode())
    file.flush()
    return True


def _outlast(pidfd: int, seconds: float, *, ask: bool) -> bool:
    """Wait until this process has ended, and `ask` it to before; False when the time is over first. Closes `pidfd`."""
    try:
        if ask:
            signal.pidfd_send_signal(pidfd, signal.SIGTERM)
        return bool(select.select([pidfd], [], [], seconds)[0])
    except ProcessLookupError:
        return True
    finally:
        os.close(pidfd)
