"""The command `fastdeploy-cache config`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

config_app = typer.Typer(
    no_args_is_help=True,
    help="Look at settings: check them, show them, print a sample.",
    epilog="Example: fastdeploy-cache config sample > cache.toml",
)
_FILE = typer.Argument(help="TOML file.")


@config_app.command(epilog="Example: fastdeploy-cache config check cache.toml")
def check(file: Annotated[Path, _FILE]) -> None:
    """Check a configuration file, print the sizes that follow from it, and try memory, device, store, keys and disk.

    Exit status 0: an engine can start with it here and now; 1: it cannot, and why, a line each.
    """
    from fastdeploy_cache import CacheConfig
    from fastdeploy_cache.launch.config_check import describe, find_problems

    config = CacheConfig.load(file)
    typer.echo(describe(config))
    problems = find_problems(config)
    for problem in problems:
        typer.echo(f"fastdeploy-cache: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


@config_app.command(epilog="Example: FASTDEPLOY_CACHE_NUM_CPU_BLOCKS=9 fastdeploy-cache config show cache.toml")
def show(
    file: Annotated[Path | None, _FILE] = None,
    json: Annotated[bool, typer.Option("--json", help="As JSON.")] = False,
    serve: Annotated[
        bool, typer.Option("--serve", help="What `serve --config FILE` has, or without a FILE `serve` alone.")
    ] = False,
) -> None:
    """Show what is in force, and where each value comes from: the file and its line, a variable, or a default.

    What says nothing by itself is shown with what it comes to. Settings that are not enough, or that cannot be, are
    shown as they were said, and exit status 1 is with the reason.
    """
    from fastdeploy_cache.errors import ConfigError
    from fastdeploy_cache.launch.config_show import (
        settings_in_force,
        settings_of_serve,
        settings_said,
        show_json,
        show_table,
    )

    try:
        found = settings_of_serve(file) if serve else settings_in_force(file)
    except ConfigError as error:
        said = settings_said(file)
        if said:
            typer.echo(show_json(said) if json else show_table(said))
        if file is None and not serve:
            raise ConfigError(f"{error}; give a FILE, or say it by variables such as FASTDEPLOY_CACHE_...") from error
        raise
    typer.echo(show_json(found) if json else show_table(found))


@config_app.command(epilog="Example: fastdeploy-cache config sample > cache.toml")
def sample() -> None:
    """Print a configuration file with every setting, what it means, and its default."""
    from fastdeploy_cache.launch.config_show import sample_file

    typer.echo(sample_file(), nl=False)
