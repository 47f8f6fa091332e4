"""The options of `simulate-faults` and of `soak`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from fastdeploy_cache import __version__
from fastdeploy_cache.errors import LaunchError, StorageError
from fastdeploy_cache.launch.faults.story import STORY_VERSION
from fastdeploy_cache.transfer_manager.storage.valkey_admin import ValkeyAdmin

_MOST_MINUTES = 60.0 * 24 * 365


@dataclass(frozen=True)
class SimulateFaultsOptions:
    """How long to look, for what, and where what is found goes."""

    minutes: Annotated[float, typer.Option(min=0.01, max=_MOST_MINUTES, help="How long to look.")] = 1.0
    seed: Annotated[int, typer.Option(min=0, help="Of the first story; the others have those behind it.")] = 0
    steps: Annotated[
        int | None,
        typer.Option(
            min=1, help="Stop at the end of the story in which so many steps are reached, even before the time."
        ),
    ] = None
    faults: Annotated[list[str], typer.Option(help="Only these, separated by commas; all of them without it.")] = field(
        default_factory=list
    )
    agents: Annotated[
        bool, typer.Option("--agents", help="Agents give hints between all acts, and engines lend what they have.")
    ] = False
    story: Annotated[
        Path | None, typer.Option(help="Run one story again, as --json has written it, to its end, and nothing else.")
    ] = None
    json_file: Annotated[
        Path | None,
        typer.Option("--json", help="Also write the counts and the found stories here; - is standard output."),
    ] = None


@dataclass(frozen=True)
class SoakOptions:
    """How long, how many ranks, and what is done to them."""

    minutes: Annotated[float, typer.Option(min=0.01, max=_MOST_MINUTES, help="How long the engines are hurt.")] = 1.0
    ranks: Annotated[int, typer.Option(min=1, max=8, help="Of each engine.")] = 2
    seed: Annotated[int, typer.Option(min=0, help="What users ask, and which fault comes next, follow from it.")] = 0
    faults: Annotated[list[str], typer.Option(help="Only these, separated by commas; all of them without it.")] = field(
        default_factory=list
    )
    valkey_url: Annotated[
        str, typer.Option(help="One store for all engines, such as valkey://127.0.0.1:6379/0; else each has a folder.")
    ] = ""
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write what was seen here; - is standard output.")
    ] = None


def fault_names(given: list[str], known: tuple[str, ...]) -> tuple[str, ...]:
    """What `--faults` names, or all that are known. Raises `typer.BadParameter` for one that is not."""
    names = [name.strip() for each in given for name in each.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"{name!r} is no fault; known: {', '.join(known)}")
    if given and not names:
        raise typer.BadParameter(f"--faults names none; known: {', '.join(known)}")
    return tuple(names) or known


def check_json(file: Path | None) -> None:
    """Raise `typer.BadParameter` where what was found cannot be written there: status 1 means a finding."""
    from fastdeploy_cache.launch.findings import check_target

    with _json_refused():
        check_target(file)


def write_found(file: Path | None, found: dict[str, Any]) -> None:
    """Write it, if it is wanted. Raises `typer.BadParameter` where it cannot be written."""
    from fastdeploy_cache.launch.findings import write_json

    with _json_refused():
        write_json(file, found)


def run_of(seed: int, faults: tuple[str, ...]) -> dict[str, Any]:
    """What `--json` says of the run itself."""
    return {"version": __version__, "story_version": STORY_VERSION, "seed": seed, "faults_drawn": list(faults)}


@contextmanager
def _json_refused() -> Iterator[None]:
    try:
        yield
    except LaunchError as error:
        raise typer.BadParameter(f"--json: {error}") from error


def check_server(url: str) -> None:
    """Ask the server of `--valkey-url`, if there is to be one. Raises `typer.BadParameter` where it does not answer."""
    try:
        if url:
            ValkeyAdmin({"server_url": url}).weights_ids()
    except StorageError as error:
        raise typer.BadParameter(f"--valkey-url: {error}") from error
