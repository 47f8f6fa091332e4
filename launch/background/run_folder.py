"""Where servers in the background keep their things: pid files, logs, sockets, and where they listen."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fastdeploy_cache.errors import LaunchError

_TAIL_LINES, _TAIL_BYTES = 5, 4000


def default_run_folder() -> Path:
    """A folder of this user's own, by the XDG rules."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "fastdeploy_cache"


@dataclass(frozen=True)
class Slot:
    """The files of one program. It runs while its pid file names a living process of ours."""

    name: str
    folder: Path
    log_folder: Path

    @property
    def pid_file(self) -> Path:
        """Holds the pid, once it was started."""
        return self.folder / f"{self.name}.pid"

    @property
    def log_file(self) -> Path:
        """What it says; what it said the time before is beside it, as `NAME.log.old`."""
        return self.log_folder / f"{self.name}.log"

    @property
    def pid(self) -> int | None:
        """The pid, if it runs and still is one of ours."""
        try:
            pid = int(self.pid_file.read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (OSError, ValueError):
            return None
        return pid if b"fastdeploy-cache" in command or b"fastdeploy_cache" in command else None

    @property
    def has_died(self) -> bool:
        """Whether it was started, does not run, and nobody has stopped it: it was killed, or the machine was."""
        return self.pid_file.exists() and self.pid is None

    @property
    def facts(self) -> dict[str, str]:
        """Where it listens: `url`, and `metrics` where it has a port for these. Empty before it was ready."""
        try:
            facts = json.loads(self._facts_file.read_text())
        except (OSError, ValueError):
            return {}
        return {str(name): str(value) for name, value in facts.items()} if isinstance(facts, dict) else {}

    def note(self, pid: int) -> None:
        """It has been started."""
        self.pid_file.write_text(f"{pid}\n")

    def note_facts(self, facts: dict[str, str]) -> None:
        """It is ready."""
        self._facts_file.write_text(json.dumps(facts) + "\n")

    def forget(self) -> None:
        """It has ended, and nobody starts it again."""
        self.pid_file.unlink(missing_ok=True)
        self._facts_file.unlink(missing_ok=True)

    def log_tail(self) -> str:
        """The last lines of its log."""
        try:
            text = self.log_file.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")
        except OSError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    @property
    def _facts_file(self) -> Path:
        return self.folder / f"{self.name}.json"


class RunFolder:
    """One server of its own, and one group, may run from a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self.log_folder = self.path / "log"
        self.group_folder = self.path / "prefill_decode"
        self.control_socket = self.path / "control" / "serve.sock"
        self.server = Slot("serve", self.path, self.log_folder)
        self.group = Slot("group", self.group_folder, self.log_folder)  # of who watches the members

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
            for folder in (self.log_folder, self.group_folder):
                folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LaunchError(f"run folder {self.path}: {error}; choose another one with --run-dir") from error

    @contextlib.contextmanager
    def locked(self, name: str, other: str = "another start or stop is at work") -> Iterator[None]:
        """One start or stop at a time, or whatever else `name` stands for. The lock goes with this process.

        Raises:
            LaunchError: another process has it; `other` says what that does.
        """
        self.make()
        with (self.path / f"{name}.lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise LaunchError(f"{other} in {self.path}") from error
            yield
