"""The commands that look at a running cache and change it, over its private socket."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from fastdeploy_cache.config.sources import RUN_FOLDER_VARIABLE
from fastdeploy_cache.errors import counted, duration, named
from fastdeploy_cache.launch.background.run_folder import folder_to_look_in
from fastdeploy_cache.launch.operating.asking import SOMETHING_IS_WRONG, RunningCache, show_json

operating_app = typer.Typer()
RunDir = Annotated[
    Path,
    typer.Option(
        envvar=RUN_FOLDER_VARIABLE,
        default_factory=folder_to_look_in,
        help="Folder that the server was started from; else the usual one, or ./run, as the scripts of a checkout use.",
    ),
]
Socket = Annotated[
    Path | None,
    typer.Option(
        help="A cache's insight.control_socket, or serve's --control-socket; else the server's in the background."
    ),
]
_RESTART = "restart-rank"
AsJson = Annotated[bool, typer.Option("--json", help="As JSON.")]


def _show(found: Any, json: bool, in_words: Callable[[], Any]) -> None:
    """What was found, as JSON or `in_words`."""
    if json:
        show_json(found)
    else:
        _print(in_words())


def _print(shown: Any) -> None:
    """A table, a tree, or lines."""
    if isinstance(shown, str):
        typer.echo(shown)
    else:
        from fastdeploy_cache.launch.findings import console_beside, print_table

        print_table(console_beside(None, 0), shown)


@operating_app.command(epilog="Example: fastdeploy-cache status --watch")
def status(
    run_dir: RunDir,
    socket: Socket = None,
    json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="With --watch: seconds between two views.")] = 2.0,
) -> None:
    """Show the tiers, ranks, hit rates and misses of a running cache.

    Exit status 0: shown; 3: nobody listens there; 4: it does not answer.
    """
    from fastdeploy_cache.launch.operating.text import status_lines

    cache = RunningCache(socket, run_dir)
    if watch:
        if json:
            raise typer.BadParameter("--json with --watch; ask again and again for JSON instead")
        from fastdeploy_cache.launch.findings import console_beside
        from fastdeploy_cache.launch.operating.watch import watch as run

        problem, code = run(cache.status, every, console_beside(None, 0))
        typer.echo(f"fastdeploy-cache: {problem}", err=True)
        raise typer.Exit(code)
    document, code = cache.status()
    if json:  # a program that reads it needs no other case
        show_json(document)
    else:
        for line in status_lines(document) if code == 0 else [document["problem"]]:
            typer.echo(f"== {line}")
    raise typer.Exit(code)


@operating_app.command(epilog="Example: fastdeploy-cache top --num 5")
def top(
    run_dir: RunDir,
    num: Annotated[int, typer.Option(min=1, max=2000, help="How many.")] = 20,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Show the prefixes that the most requests have used, and what of them is where.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import top_table

    found = RunningCache(socket, run_dir).look("top", num_prefixes=num)
    _show(found, json, lambda: top_table(found) if found else "nothing is cached")


@operating_app.command(epilog="Example: fastdeploy-cache tree --depth 3")
def tree(
    run_dir: RunDir,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Prefixes in a row, at most.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, max=2000, help="Prefixes in all, at most.")] = 100,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Show the prefix tree where it is used most, and what is left out.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import prefix_tree

    found = RunningCache(socket, run_dir).look("tree", depth=depth, max_nodes=nodes)
    _show(found, json, lambda: prefix_tree(found))


@operating_app.command(epilog="Example: fastdeploy-cache requests --num 10")
def requests(
    run_dir: RunDir,
    num: Annotated[int, typer.Option(min=1, max=2000, help="Running ones, and recent ones, at most.")] = 20,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Show the requests that run now, and what the last ones hit and missed.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import recent_line, requests_table

    found = RunningCache(socket, run_dir).look("requests", num_requests=num)
    if json:
        show_json(found)
        return
    typer.echo(f"{found['num_running']} running")
    if found["running"]:
        _print(requests_table(found))
    if found["recent"]:
        typer.echo("\n".join(["the last ones, the newest first:", *map(recent_line, found["recent"])]))


@operating_app.command(epilog="Example: fastdeploy-cache ranks")
def ranks(run_dir: RunDir, socket: Socket = None, json: AsJson = False) -> None:
    """Show the processes that copy, and what they have to do.

    Exit status 0: all are up; 1: it cannot be asked; 3: nobody listens there; 4: one is down.
    """
    from fastdeploy_cache.launch.operating.text import ranks_table

    found = RunningCache(socket, run_dir).look("ranks")
    if json:
        show_json(found)
    else:
        _print(ranks_table(found) if found["ranks"] else "this cache has no processes of its own")
        loads, copies = found["num_loads_in_flight"], found["num_copies_down_in_flight"]
        typer.echo(f"in flight: {counted(loads, 'load')}, {counted(copies, 'copy')} down")
    raise typer.Exit(0 if all(each["up"] for each in found["ranks"]) else SOMETHING_IS_WRONG)


@operating_app.command(epilog="Example: fastdeploy-cache pin 0123456789abcdef --seconds 3600")
def pin(
    name: Annotated[str, typer.Argument(help="Of the prefix, as in `top` and `tree`.")],
    run_dir: RunDir,
    seconds: Annotated[float, typer.Option(min=0.001, max=604800, help="For so long, from now on.")] = 3600.0,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Keep a prefix in its tiers for a time, whatever else is needed.

    Exit status 0: done; 1: refused, as it is not cached, or too much is pinned; 3: nobody listens there.
    """
    found = RunningCache(socket, run_dir).look("pin", name=name, seconds=seconds)
    what = f"{counted(found['num_tokens'], 'token')}, {counted(found['num_blocks'], 'block')}"
    _show(found, json, lambda: f"pinned {what}, for {duration(seconds)}")


@operating_app.command(epilog="Example: fastdeploy-cache unpin 0123456789abcdef")
def unpin(
    name: Annotated[str, typer.Argument(help="Of the pin, as in `pins`.")],
    run_dir: RunDir,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """End a pin before its time.

    Exit status 0: done; 1: there is none of that name; 3: nobody listens there.
    """
    found = RunningCache(socket, run_dir).look("unpin", name=name)
    _show(found, json, lambda: f"unpinned {counted(found['num_blocks'], 'block')}")


@operating_app.command(epilog="Example: fastdeploy-cache pins")
def pins(run_dir: RunDir, socket: Socket = None, json: AsJson = False) -> None:
    """Show what is pinned, and for how long.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import pins_table

    found = RunningCache(socket, run_dir).look("pins")
    _show(found, json, lambda: pins_table(found) if found else "nothing is pinned")


@operating_app.command(epilog="Example: fastdeploy-cache policy lfu")
def policy(
    run_dir: RunDir,
    name: Annotated[str | None, typer.Argument(help="Evict by this one from now on.")] = None,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Show the eviction policy, or set another one. What is cached stays, and how often it was used is known on.

    Exit status 0: done; 1: refused; 3: nobody listens there.
    """
    cache = RunningCache(socket, run_dir)
    found = cache.look("policy") if name is None else cache.look("set-policy", name=name)
    known = ", ".join(found["known"])
    _show(found, json, lambda: f"{found['name']} (configured: {found['configured']}; known: {known})")


@operating_app.command("what-if", epilog="Example: fastdeploy-cache what-if")
def what_if(run_dir: RunDir, socket: Socket = None, json: AsJson = False) -> None:
    """Show what the last hour would have hit with other sizes of each tier: whether more memory would pay.

    It is known after 10 requests, counted from the first metrics endpoint or the first such look on.
    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import WHAT_IF_NOT_KNOWN, what_if_table

    found = RunningCache(socket, run_dir).look("what-if")
    _show(found, json, lambda: what_if_table(found) if found else WHAT_IF_NOT_KNOWN)


@operating_app.command(epilog="Example: fastdeploy-cache flight last.flight")
def flight(
    run_dir: RunDir,
    file: Annotated[Path | None, typer.Argument(help="Where to, or a folder; else insight.flight_folder.")] = None,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Write what the flight recorder of a running cache has kept. The file goes to the machine of that cache.

    Exit status 0: written; 1: refused, or it cannot be written; 3: nobody listens there.
    """
    wanted = str(file.absolute()) if file is not None else None
    found = RunningCache(socket, run_dir).look("write-flight", file=wanted)
    path = found["file"]
    _show(found, json, lambda: f"written to {path}; look at it with: fastdeploy-cache simulate --replay {path}")


@operating_app.command(epilog="Example: fastdeploy-cache verify")
def verify(
    run_dir: RunDir,
    checksums: Annotated[bool, typer.Option("--checksums", help="Say of bytes, too, what is checked.")] = False,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Check that the books of a running cache add up. It stands still meanwhile: 3 seconds for a million blocks.

    Exit status 0: they do; 1: it cannot be asked; 3: nobody listens there; 4: they do not.
    """
    found = RunningCache(socket, run_dir).look("verify", checksums=checksums)
    if json:
        show_json(found)
    else:
        for text in found["checked"]:
            typer.echo(f"checked: {text}")
        for text in found["not_checked"]:
            typer.echo(f"not checked: {text}")
        problem = found["problem"]
        typer.echo(f"all hold ({duration(found['seconds'])})" if problem is None else f"BROKEN: {problem}")
    raise typer.Exit(0 if found["problem"] is None else SOMETHING_IS_WRONG)


@operating_app.command(epilog="Example: fastdeploy-cache explain --last 3")
def explain(
    run_dir: RunDir,
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Its X-Request-ID, the id in its answer's body, or that in the log."),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100, help="Without an id: so many of the last requests.")] = 1,
    socket: Socket = None,
    json: AsJson = False,
) -> None:
    """Show where the prompt tokens of a request came from, and why the others did not.

    Exit status 0: shown; 1: the cache does not remember such a request; 3: nobody listens there.
    """
    cache = RunningCache(socket, run_dir)
    if request_id is None:
        found = cache.look("explain-last", num_requests=last)
    else:
        found = cache.look("explain", request_id=request_id)
    _show_texts(found, "no request has been admitted yet", as_json=json)


@operating_app.command(epilog="Example: fastdeploy-cache doctor")
def doctor(
    run_dir: RunDir,
    socket: Socket = None,
    metrics: Annotated[
        str | None, typer.Option(metavar="FILE_OR_URL", help="Go by a page of metrics, where only that can be reached.")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go by a file of the flight recorder, which is replayed.")
    ] = None,
    json: AsJson = False,
) -> None:
    """Say what is wrong with a running cache: the evidence, what to change, and what that can give.

    Exit status 0: nothing is; 1: it cannot be asked; 3: nobody listens there; 4: something is wrong.
    """
    if metrics is not None and recording is not None:
        raise typer.BadParameter("--metrics with --recording; give one of them")
    if metrics is not None:
        from fastdeploy_cache.launch.operating.doctor_page import findings_of_page

        found = findings_of_page(metrics)
    elif recording is not None:
        from fastdeploy_cache.launch.operating.doctor_recording import findings_of_recording

        found = findings_of_recording(recording)
    else:
        found = RunningCache(socket, run_dir).look("examine")
    _show_texts(found, "nothing is wrong, as far as can be seen", as_json=json)
    raise typer.Exit(SOMETHING_IS_WRONG if found else 0)


def _show_texts(found: list[dict[str, Any]], otherwise: str, *, as_json: bool) -> None:
    texts = [each.pop("text") for each in found]
    _show(found, as_json, lambda: "\n".join(texts) or otherwise)


@operating_app.command("control", epilog="Example: fastdeploy-cache control pause")
def control_cache(
    verb: Annotated[str, typer.Argument(help="pause, resume, sleep, wake, clear, update-weights or restart-rank.")],
    run_dir: RunDir,
    name: Annotated[
        str | None,
        typer.Argument(
            help="update-weights: the new name of the weights; needed with storage. "
            "restart-rank: the number of a rank that is down; all of them without it."
        ),
    ] = None,
    socket: Socket = None,
    tier: Annotated[list[str] | None, typer.Option(help="sleep: gpu or cpu alone; both without it.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that it may take, up to 600.")] = 30.0,
    json: AsJson = False,
) -> None:
    """Pause, resume, put to sleep, wake or clear a running cache, tell it of new weights, or start its ranks that are
    down; print how it is then.

    Exit status 0: done; 1: refused or failed; 3: nobody listens there.
    """
    _check_control(verb, name, tier, timeout)
    if verb == _RESTART:
        found = RunningCache(socket, run_dir).look(verb, rank=None if name is None else int(name))
        _show(found, json, lambda: _restarted(found["ranks"]))
        return
    given = {"tiers": tier or None, "weights_id": name}
    fields = {name: value for name, value in given.items() if value is not None}
    status = RunningCache(socket, run_dir).ask(verb, timeout, **fields)
    _show({"status": status}, json, lambda: _done(verb, name, tier or []) + status)


def _restarted(ranks: list[int]) -> str:
    if not ranks:
        return "nothing to restart: every rank has its process"
    return f"{named('rank', ranks, 'is', 'are')} being started; `fastdeploy-cache ranks` shows whether that helps"


def _done(verb: str, weights_id: str | None, tiers: list[str]) -> str:
    """What was done, where the status that follows does not say it."""
    if verb == "clear":
        return "cleared; "
    if verb == "update-weights":
        return f"cleared, for the weights {weights_id!r}; " if weights_id is not None else "cleared, for new weights; "
    return f"the {tiers[0].upper()} tier alone was put to sleep; " if len(set(tiers)) == 1 else ""


def _check_control(verb: str, name: str | None, tier: list[str] | None, timeout: float) -> None:
    """Wrong usage: status 2."""
    from fastdeploy_cache.insight.control.messages import LIFE_VERBS, MAX_SECONDS

    if verb not in (*LIFE_VERBS, _RESTART):
        raise typer.BadParameter(f"{verb!r} is no verb; use one of {', '.join((*LIFE_VERBS, _RESTART))}")
    if name is not None and verb == _RESTART and not name.isdecimal():
        raise typer.BadParameter(f"{name!r} behind {verb}; give the number of a rank, or nothing for all")
    if name is not None and verb not in ("update-weights", _RESTART):
        raise typer.BadParameter(f"{name!r} behind {verb}; only update-weights takes a name")
    if tier and (verb != "sleep" or set(tier) - {"gpu", "cpu"}):
        raise typer.BadParameter(f"--tier {' '.join(tier)} with {verb}; sleep takes gpu and cpu")
    if not 0 < timeout <= MAX_SECONDS:
        raise typer.BadParameter(f"--timeout {timeout}; use more than 0 and up to {MAX_SECONDS:.0f} seconds")
