"""The commands `start`, `stop`, `up` and `deploy`."""

from __future__ import annotations

import dataclasses
from json import dumps
from pathlib import Path
from typing import Annotated

import typer

from fastdeploy_cache.config.sources import RUN_FOLDER_VARIABLE
from fastdeploy_cache.launch.background.group_plan import GroupPlan
from fastdeploy_cache.launch.background.run_folder import RunFolder, default_run_folder
from fastdeploy_cache.launch.options import LogOptions, spread

background_app = typer.Typer()
RunDir = Annotated[
    Path,
    typer.Option(
        envvar=RUN_FOLDER_VARIABLE, default_factory=default_run_folder, help="Folder of pid files, logs and sockets."
    ),
]
_GOES_ON = {"allow_extra_args": True, "ignore_unknown_options": True}


def _say(line: str) -> None:
    typer.echo(f"== {line}")


def _arguments_of_serve(context: typer.Context) -> tuple[str, ...]:
    """What is given beside our own options; refused here, and not by a server that is being started, if it is wrong."""
    arguments = tuple(context.args)
    assert context.parent is not None
    commands = context.parent.command
    serve = commands.get_command(context.parent, "serve")  # type: ignore[attr-defined]
    serve.make_context("serve", list(arguments), parent=context.parent)
    return arguments


@background_app.command(
    context_settings=_GOES_ON, epilog="Example: fastdeploy-cache start --port 8000 --storage /ssd/kv"
)
def start(context: typer.Context, run_dir: RunDir) -> None:
    """Start `serve` in the background and wait until it is ready. Other options go on to it; see `serve --help`."""
    from fastdeploy_cache.launch.background.single import start as run

    run(RunFolder(run_dir), _arguments_of_serve(context), _say)


@background_app.command(epilog="Example: fastdeploy-cache stop")
def stop(run_dir: RunDir) -> None:
    """End the server in the background cleanly; it is killed after 30 seconds."""
    from fastdeploy_cache.launch.background.single import stop as run

    run(RunFolder(run_dir), _say)


@background_app.command(context_settings=_GOES_ON, epilog="Example: fastdeploy-cache up")
@spread
def up(
    context: typer.Context,
    run_dir: RunDir,
    plan: GroupPlan,
    log: LogOptions,
    show: Annotated[bool, typer.Option("--status", help="Show each member of the group that runs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --status: as JSON.")] = False,
    stop_it: Annotated[bool, typer.Option("--stop", help="End the group, also one that is starting.")] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, as a service does, until SIGTERM.")] = False,
) -> int:
    """Start a group in the background: instances that compute prompts, instances that answer, and a router.

    Other options go on to `serve`, of every instance. A member that ends is started again, at its ports, after a second
    or, when it goes on like that, up to a minute. With --status exit status 3: nothing runs; 4: not all of it does.
    """
    from fastdeploy_cache.launch.background.group import describe_group, show_group, start_group, stop_group

    log.set_up()  # it goes on to all processes
    folder = RunFolder(run_dir)
    if json and not show:
        raise typer.BadParameter("--json goes with --status")
    if show or stop_it:
        if context.args or (show and stop_it):
            raise typer.BadParameter(f"--status and --stop take nothing beside them; got {' '.join(context.args)}")
        if stop_it:
            stop_group(folder, _say)
            return 0
        if not json:
            return show_group(folder, _say)
        document, code = describe_group(folder)
        typer.echo(dumps(document, indent=2))
        return code
    plan = dataclasses.replace(plan, serve=_arguments_of_serve(context))
    if foreground:
        from fastdeploy_cache.launch.background.supervisor import Supervisor

        return Supervisor(plan, folder).run()
    start_group(plan, folder, _say)
    return 0


@background_app.command(epilog="Example: fastdeploy-cache deploy --print prometheus.yml > prometheus.yml")
def deploy(
    run_dir: RunDir,
    name: Annotated[str | None, typer.Option("--print", metavar="NAME", help="Print this file.")] = None,
    to: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Write all of them into this folder.")] = None,
) -> None:
    """Print or write what other programs need to run or watch this one: Prometheus, Grafana, systemd, Compose."""
    from fastdeploy_cache.launch.background.deployment import describe, filled_in, write_all

    if to is not None:
        typer.echo("\n".join(str(path) for path in write_all(to, run_dir)))
    else:
        typer.echo(describe() if name is None else filled_in(name, run_dir), nl=name is None)
