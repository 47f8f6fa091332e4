"""Asks a running cache for a command, and ends the command where nobody is there to answer."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Any, NoReturn

import typer

from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.control.client import ask, look
from fastdeploy_cache.launch.background.run_folder import RunFolder
from fastdeploy_cache.launch.background.single import absence

NOBODY_LISTENS, SOMETHING_IS_WRONG = 3, 4  # exit statuses
_LOOK_SECONDS = 1.0  # that an answer may take beside the ten that are always given
_OTHERS = (
    "--run-dir run is for one that ./launch/start.sh has started, --socket PATH for any cache with a control socket"
)
_LONG_SECONDS = 120.0  # the same where the whole cache is walked through
_LONG = ("verify", "pin", "set-policy", "write-flight")


class RunningCache:
    """The cache behind a socket: the one that was named, or that of the server in the background."""

    def __init__(self, socket: Path | None, run_dir: Path) -> None:
        self.folder = RunFolder(run_dir)
        self.is_own = socket is None
        self.path = socket if socket is not None else self.folder.control_socket

    def look(self, verb: str, **fields: Any) -> Any:
        """What is found. Raises `ControlError`; leaves with status 3 where nobody listens."""
        try:
            return look(self.path, verb, _LONG_SECONDS if verb in _LONG else _LOOK_SECONDS, **fields)
        except (FileNotFoundError, ConnectionRefusedError):
            self._leave()

    def ask(self, verb: str, timeout_seconds: float, **fields: Any) -> str:
        """The status of the cache after the verb. Raises and leaves as `look`."""
        try:
            return ask(self.path, verb, timeout_seconds, **fields)
        except (FileNotFoundError, ConnectionRefusedError):
            self._leave()

    def status(self) -> tuple[dict[str, Any], int]:
        """Its state, or the `problem` with it; and the exit status that says so."""
        slot = self.folder.server
        pid, facts = (slot.pid, slot.facts) if self.is_own else (None, {})
        try:
            found = look(self.path, "status", _LOOK_SECONDS)
        except (FileNotFoundError, ConnectionRefusedError):
            if pid is None:
                text = self._nobody()
                return {"pid": None, "problem": text}, NOBODY_LISTENS
            problem = f"running with pid {pid}, and it does not answer; its log is {slot.log_file}"
            return {"pid": pid, "problem": problem}, SOMETHING_IS_WRONG
        except ControlError as error:
            problem = f"running with pid {pid}, and it does not answer; its log is {slot.log_file}"
            return {"pid": pid, "problem": problem if pid is not None else str(error)}, SOMETHING_IS_WRONG
        return {**facts, **found}, 0

    def _nobody(self) -> str:
        if not self.is_own:
            return f"not running: no server listens at {self.path}"
        return f"{absence(self.folder)}: no server listens at {self.path}; {_OTHERS}"

    def _leave(self) -> NoReturn:
        typer.echo(f"fastdeploy-cache: {self._nobody()}", err=True)
        raise typer.Exit(NOBODY_LISTENS)


def show_json(found: Any) -> None:
    """Print it for programs."""
    typer.echo(dumps(found, indent=2))
