"""The commands `start`, `stop`, `status`, `explain`, `doctor`, `control`, `up` and `deploy`."""

from __future__ import annotations

from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from fastdeploy_cache.config_sources import RUN_FOLDER_VARIABLE
from fastdeploy_cache.ipc.log_lines import FORMAT_VARIABLE, LEVEL_VARIABLE, set_up_log
from fastdeploy_cache.launch.background.run_folder import RunFolder, default_run_folder

background_app = typer.Typer()
RunDir = Annotated[
    Path,
    typer.Option(
        envvar=RUN_FOLDER_VARIABLE, default_factory=default_run_folder, help="Folder of pid files, logs and sockets."
    ),
]
LogLevel = Annotated[
    str | None, typer.Option(help=f"debug, info, warning or error, of all processes; otherwise {LEVEL_VARIABLE}.")
]
LogFormat = Annotated[
    str | None, typer.Option(help=f"text, or json for an object in each line; otherwise {FORMAT_VARIABLE}.")
]
Socket = Annotated[
    Path | None, typer.Option(help="The server's --control-socket; else that of the server in the background.")
]
AsJson = Annotated[bool, typer.Option("--json", help="As JSON, a list.")]
_LOOK_SECONDS = 5.0
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


@background_app.command(epilog="Example: fastdeploy-cache status --json")
def status(
    run_dir: RunDir,
    json: Annotated[bool, typer.Option("--json", help="Everything, as JSON.")] = False,
) -> None:
    """Show ranks, tiers and hit rates of the server in the background.

    Exit status 3: it is not running; 4: it does not answer.
    """
    from fastdeploy_cache.launch.background.single import status as run

    folder, said = RunFolder(run_dir), list[str]()
    code = run(folder, said.append if json else _say, as_json=json)
    if json:  # what is said of a server that does not answer is no JSON
        typer.echo(said[0] if code == 0 else dumps({"pid": folder.server.pid, "problem": said[0]}, indent=2))
    raise typer.Exit(code)


@background_app.command(context_settings=_GOES_ON, epilog="Example: fastdeploy-cache up")
def up(
    context: typer.Context,
    run_dir: RunDir,
    prefill: Annotated[int, typer.Option(min=1, help="Instances that compute prompts.")] = 1,
    decode: Annotated[int, typer.Option(min=1, help="Instances that answer.")] = 1,
    prefill_ranks: Annotated[int, typer.Option(min=1, help="Ranks of each prefill instance.")] = 1,
    decode_ranks: Annotated[int, typer.Option(min=1, help="Ranks of each decode instance.")] = 1,
    host: Annotated[str, typer.Option(help="Address of the router.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the router; 0 takes a free one.")] = 8000,
    show: Annotated[bool, typer.Option("--status", help="Show each member of the group that runs.")] = False,
    json: Annotated[bool, typer.Option("--json", help="With --status: as JSON.")] = False,
    stop_it: Annotated[bool, typer.Option("--stop", help="End the group, also one that is starting.")] = False,
    foreground: Annotated[bool, typer.Option("--foreground", help="Stay, as a service does, until SIGTERM.")] = False,
    log_level: LogLevel = None,
    log_format: LogFormat = None,
) -> None:
    """Start a group in the background: instances that compute prompts, instances that answer, and a router.

    Other options go on to `serve`, of every instance. A member that ends is started again, at its ports, after a second
    or, when it goes on like that, up to a minute. With --status exit status 3: nothing runs; 4: not all of it does.
    """
    from fastdeploy_cache.launch.background.group import start_group, stop_group
    from fastdeploy_cache.launch.background.group_plan import GroupPlan

    set_up_log(log_level, log_format)  # it goes on to all processes
    folder = RunFolder(run_dir)
    if json and not show:
        raise typer.BadParameter("--json goes with --status")
    if show or stop_it:
        if context.args or (show and stop_it):
            raise typer.BadParameter(f"--status and --stop take nothing beside them; got {' '.join(context.args)}")
        if stop_it:
            stop_group(folder, _say)
        raise typer.Exit(_show_group(folder, as_json=json) if show else 0)
    plan = GroupPlan(
        num_prefill=prefill,
        num_decode=decode,
        prefill_ranks=prefill_ranks,
        decode_ranks=decode_ranks,
        host=host,
        port=port,
        serve=_arguments_of_serve(context),
    )
    if not foreground:
        start_group(plan, folder, _say)
        return
    from fastdeploy_cache.launch.background.supervisor import Supervisor

    raise typer.Exit(0 if Supervisor(plan, folder).run() else 1)


def _show_group(folder: RunFolder, *, as_json: bool) -> int:
    """Returns the exit status."""
    from fastdeploy_cache.launch.background.group import describe_group, show_group

    if not as_json:
        return show_group(folder, _say)
    document, code = describe_group(folder)
    typer.echo(dumps(document, indent=2))
    return code


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


@background_app.command("control", epilog="Example: fastdeploy-cache control pause")
def control_server(
    verb: Annotated[str, typer.Argument(help="pause, resume, sleep, wake, clear or update-weights.")],
    run_dir: RunDir,
    weights_id: Annotated[
        str | None, typer.Argument(help="update-weights: the new name of the weights; needed with storage.")
    ] = None,
    socket: Socket = None,
    tier: Annotated[list[str] | None, typer.Option(help="sleep: gpu or cpu alone; both without it.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that it may take, up to 600.")] = 30.0,
) -> None:
    """Pause, resume, put to sleep, wake or clear a running server, or tell it of new weights; print how it is then.

    Exit status 0: done; 1: refused or failed; 3: no server listens there.
    """
    from fastdeploy_cache.launch.background.single import absence
    from fastdeploy_cache.launch.server.control_client import ask

    folder = RunFolder(run_dir)
    path = socket or folder.control_socket
    _check_control(verb, weights_id, tier, timeout)
    given = {"tiers": tier or None, "weights_id": weights_id}
    fields = {name: value for name, value in given.items() if value is not None}
    try:
        status = ask(path, verb, timeout, **fields)
    except (FileNotFoundError, ConnectionRefusedError):
        text = absence(folder) if socket is None else "not running"
        typer.echo(f"fastdeploy-cache: {text}: no server listens at {path}", err=True)
        raise typer.Exit(3) from None
    typer.echo(_done(verb, weights_id, tier or []) + status)


def _done(verb: str, weights_id: str | None, tiers: list[str]) -> str:
    """What was done, where the status that follows does not say it."""
    if verb == "clear":
        return "cleared; "
    if verb == "update-weights":
        return f"cleared, for the weights {weights_id!r}; " if weights_id is not None else "cleared, for new weights; "
    return f"the {tiers[0].upper()} tier alone was put to sleep; " if len(set(tiers)) == 1 else ""


@background_app.command(epilog="Example: fastdeploy-cache explain --last 3")
def explain(
    run_dir: RunDir,
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Its X-Request-ID, or its id in the log."),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100, help="Without an id: so many of the last requests.")] = 1,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Show where the prompt tokens of a request came from, and why the others did not.

    Exit status 0: shown; 1: the server does not remember such a request; 3: no server listens there.
    """
    socket = socket or RunFolder(run_dir).control_socket
    if request_id is None:
        found = _look(socket, "explain-last", num_requests=last)
    else:
        found = _look(socket, "explain", request_id=request_id)
    texts = [each.pop("text") for each in found]
    typer.echo(dumps(found, indent=2) if json else "\n".join(texts) or "no request has been admitted yet")


@background_app.command(epilog="Example: fastdeploy-cache doctor")
def doctor(run_dir: RunDir, socket: Socket = None, json: AsJson = False) -> None:
    """Say what is wrong with a running server's cache: the evidence, what to change, and what that can give.

    Exit status 0: nothing is; 1: it cannot be asked; 3: no server listens there; 4: something is wrong.
    """
    found = _look(socket or RunFolder(run_dir).control_socket, "examine")
    texts = [each.pop("text") for each in found]
    typer.echo(dumps(found, indent=2) if json else "\n".join(texts) or "nothing is wrong, as far as can be seen")
    raise typer.Exit(4 if found else 0)


def _look(socket: Path, verb: str, **fields: object) -> list[dict[str, Any]]:
    from fastdeploy_cache.launch.server.control_client import look

    try:
        return look(socket, verb, _LOOK_SECONDS, **fields)
    except (FileNotFoundError, ConnectionRefusedError):
        typer.echo(f"fastdeploy-cache: not running: no server listens at {socket}", err=True)
        raise typer.Exit(3) from None


def _check_control(verb: str, weights_id: str | None, tier: list[str] | None, timeout: float) -> None:
    """Wrong usage: status 2."""
    from fastdeploy_cache.launch.server.control_socket import MAX_SECONDS, VERBS

    if verb not in VERBS:
        raise typer.BadParameter(f"{verb!r} is no verb; use one of {', '.join(VERBS)}")
    if weights_id is not None and verb != "update-weights":
        raise typer.BadParameter(f"{weights_id!r} behind {verb}; only update-weights takes a name")
    if tier and (verb != "sleep" or set(tier) - {"gpu", "cpu"}):
        raise typer.BadParameter(f"--tier {' '.join(tier)} with {verb}; sleep takes gpu and cpu")
    if not 0 < timeout <= MAX_SECONDS:
        raise typer.BadParameter(f"--timeout {timeout}; use more than 0 and up to {MAX_SECONDS:.0f} seconds")
