"""Asks a running cache for a command, and ends the command where nobody is there to answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from fastdeploy_cache.config.sources import RUN_FOLDER_VARIABLE
from fastdeploy_cache.errors import ControlError
from fastdeploy_cache.insight.control.client import ask, look
from fastdeploy_cache.launch.background.run_folder import RunFolder, folder_to_look_in
from fastdeploy_cache.launch.background.single import absence

NOBODY_LISTENS, SOMETHING_IS_WRONG = 3, 4  # exit statuses
_LOOK_SECONDS = 1.0  # that an answer may take beside the ten that are always given
_OTHERS = (
    "--run-dir run is for one that ./launch/start.sh has started, --socket PATH for any cache with a control socket"
)
_LONG_SECONDS = 120.0  # the same where the whole cache is walked through
_LONG = ("verify", "forget", "pin", "set-policy", "write-flight")


@dataclass(frozen=True)
class RunningCache:
    """The options of every command: the cache behind a socket, or that of the server in the background."""

    run_dir: Annotated[
        Path,
        typer.Option(
            envvar=RUN_FOLDER_VARIABLE,
            default_factory=folder_to_look_in,
            help="Folder that the server was started from; else the usual one, or ./run, as the scripts of a checkout "
            "use.",
        ),
    ]
    socket: Annotated[
        Path | None,
        typer.Option(
            help="A cache's insight.control_socket, or serve's --control-socket; else the server's in the background."
        ),
    ] = None
    as_json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False

    @property
    def folder(self) -> RunFolder:
        """Where the server in the background keeps its things. Raises `LaunchError` where it may not be used."""
        return RunFolder(self.run_dir)

    @property
    def path(self) -> Path:
        """The socket. Raises as `folder`, also where it is named."""
        folder = self.folder
        return self.socket if self.socket is not None else folder.control_socket

    def look(self, verb: str, **fields: Any) -> Any:
        """What is found. Raises `ControlError`; leaves with status 3 where nobody listens."""
        return self._asked(look, verb, _LONG_SECONDS if verb in _LONG else _LOOK_SECONDS, fields)

    def ask(self, verb: str, timeout_seconds: float, **fields: Any) -> str:
        """The status of the cache after the verb. Raises and leaves as `look`."""
        return str(self._asked(ask, verb, timeout_seconds, fields))

    def _asked(self, how: Callable[..., Any], verb: str, seconds: float, fields: dict[str, Any]) -> Any:
        try:
            return how(self.path, verb, seconds, **fields)
        except (FileNotFoundError, ConnectionRefusedError):
            typer.echo(f"fastdeploy-cache: {self._nobody()}", err=True)
            raise typer.Exit(NOBODY_LISTENS) from None

    def status(self) -> tuple[dict[str, Any], int]:
        """Its state, or the `problem` with it; and the exit status that says so."""
        slot = self.folder.server
        pid, facts = (slot.pid, slot.facts) if self.socket is None else (None, {})
        try:
            return {**facts, **look(self.path, "status", _LOOK_SECONDS)}, 0
        except (FileNotFoundError, ConnectionRefusedError):
            problem, code = self._nobody(), NOBODY_LISTENS
        except ControlError as error:
            problem, code = str(error), SOMETHING_IS_WRONG
        if pid is not None:
            problem = f"running with pid {pid}, and it does not answer; its log is {slot.log_file}"
            code = SOMETHING_IS_WRONG
        return {"pid": pid, "problem": problem}, code

    def show(self, found: Any, in_words: Callable[[], Any]) -> None:
        """What was found, for programs or `in_words`: a table, a tree, a line, or a list of these."""
        if self.as_json:
            typer.echo(dumps(found, indent=2))
            return
        shown = in_words()
        for each in shown if isinstance(shown, list) else [shown]:
            if isinstance(each, str):
                typer.echo(each)
            else:
                from fastdeploy_cache.launch.findings import console_beside, print_table

                print_table(console_beside(None, 0), each)

    def _nobody(self) -> str:
        if self.socket is not None:
            return f"not running: no server listens at {self.path}"
        return f"{absence(self.folder)}: no server listens at {self.path}; {_OTHERS}"
