"""The commands that look at a running cache and change it, over its private socket."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from fastdeploy_cache.errors import counted, duration
from fastdeploy_cache.launch.operating.asking import SOMETHING_IS_WRONG, RunningCache
from fastdeploy_cache.launch.options import spread

operating_app = typer.Typer()
_RESTART = "restart-rank"
_FREEING = {"release": "release-session", "supersede": "supersede", "demote": "demote"}  # hints, and their verbs


@operating_app.command(epilog="Example: fastdeploy-cache status --watch")
@spread
def status(
    cache: RunningCache,
    watch: Annotated[bool, typer.Option("--watch", help="Go on until Ctrl-C.")] = False,
    every: Annotated[float, typer.Option(min=0.1, max=3600, help="With --watch: seconds between two views.")] = 2.0,
) -> int:
    """Show the tiers, ranks, hit rates and misses of a running cache.

    Exit status 0: shown; 3: nobody listens there; 4: it does not answer.
    """
    from fastdeploy_cache.launch.operating.text import status_lines

    if watch:
        if cache.as_json:
            raise typer.BadParameter("--json with --watch; ask again and again for JSON instead")
        from fastdeploy_cache.launch.findings import console_beside
        from fastdeploy_cache.launch.operating.watch import watch as run

        problem, code = run(cache.status, every, console_beside(None, 0))
        typer.echo(f"fastdeploy-cache: {problem}", err=True)
        return code
    document, code = cache.status()  # as JSON the same document, however it is: a program needs no other case
    lines = [document["problem"]] if code else status_lines(document)
    cache.show(document, lambda: [f"== {line}" for line in lines])
    return code


@operating_app.command(epilog="Example: fastdeploy-cache top --num 5")
@spread
def top(cache: RunningCache, num: Annotated[int, typer.Option(min=1, max=2000, help="How many.")] = 20) -> None:
    """Show the prefixes that the most requests have used, and what of them is where.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import top_table

    found = cache.look("top", num_prefixes=num)
    cache.show(found, lambda: top_table(found) if found else "nothing is cached")


@operating_app.command(epilog="Example: fastdeploy-cache tree --depth 3")
@spread
def tree(
    cache: RunningCache,
    depth: Annotated[int, typer.Option(min=1, max=64, help="Prefixes in a row, at most.")] = 4,
    nodes: Annotated[int, typer.Option(min=1, max=2000, help="Prefixes in all, at most.")] = 100,
) -> None:
    """Show the prefix tree where it is used most, and what is left out.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import prefix_tree

    found = cache.look("tree", depth=depth, max_nodes=nodes)
    cache.show(found, lambda: prefix_tree(found))


@operating_app.command(epilog="Example: fastdeploy-cache requests --num 10")
@spread
def requests(
    cache: RunningCache,
    num: Annotated[int, typer.Option(min=1, max=2000, help="Running ones, and recent ones, at most.")] = 20,
) -> None:
    """Show the requests that run now, and what the last ones hit and missed.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import recent_line, requests_table

    found = cache.look("requests", num_requests=num)
    running = [requests_table(found)] if found["running"] else []
    recent = ["the last ones, the newest first:", *map(recent_line, found["recent"])] if found["recent"] else []
    cache.show(found, lambda: [f"{found['num_running']} running", *running, *recent])


@operating_app.command(epilog="Example: fastdeploy-cache ranks")
@spread
def ranks(cache: RunningCache) -> int:
    """Show the processes that copy, and what they have to do.

    Exit status 0: all are up; 1: it cannot be asked; 3: nobody listens there; 4: one is down.
    """
    from fastdeploy_cache.launch.operating.text import ranks_table

    found = cache.look("ranks")
    table = ranks_table(found) if found["ranks"] else "this cache has no processes of its own"
    loads, copies = found["num_loads_in_flight"], found["num_copies_down_in_flight"]
    cache.show(found, lambda: [table, f"in flight: {counted(loads, 'load')}, {counted(copies, 'copy')} down"])
    return 0 if all(each["up"] for each in found["ranks"]) else SOMETHING_IS_WRONG


@operating_app.command(epilog="Example: fastdeploy-cache pin 0123456789abcdef --seconds 3600")
@spread
def pin(
    cache: RunningCache,
    name: Annotated[str, typer.Argument(help="Of the prefix, as in `top` and `tree`.")],
    seconds: Annotated[float, typer.Option(min=0.001, max=604800, help="For so long, from now on.")] = 3600.0,
) -> None:
    """Keep a prefix in its tiers for a time, whatever else is needed.

    Exit status 0: done; 1: refused, as it is not cached, or too much is pinned; 3: nobody listens there.
    """
    found = cache.look("pin", name=name, seconds=seconds)
    what = f"{counted(found['num_tokens'], 'token')}, {counted(found['num_blocks'], 'block')}"
    cache.show(found, lambda: f"pinned {what}, for {duration(seconds)}")


@operating_app.command(epilog="Example: fastdeploy-cache unpin 0123456789abcdef")
@spread
def unpin(cache: RunningCache, name: Annotated[str, typer.Argument(help="Of the pin, as in `pins`.")]) -> None:
    """End a pin before its time.

    Exit status 0: done; 1: there is none of that name; 3: nobody listens there.
    """
    found = cache.look("unpin", name=name)
    cache.show(found, lambda: f"unpinned {counted(found['num_blocks'], 'block')}")


@operating_app.command(epilog="Example: fastdeploy-cache forget acme")
@spread
def forget(cache: RunningCache, namespace: Annotated[str, typer.Argument(help="- reads it from stdin.")]) -> int:
    """Forget all that is cached of a namespace, and overwrite it.

    Exit status 0: nothing is left that the cache knows of; 1: refused; 3: nobody listens there; 4: something may be
    left, and is named.
    """
    from fastdeploy_cache.launch.operating.text import forget_lines

    name = namespace if namespace != "-" else sys.stdin.readline().removesuffix("\n")  # others see arguments
    found = cache.look("forget", namespace=name)
    cache.show(found, lambda: forget_lines(found))
    return SOMETHING_IS_WRONG if found["left"] else 0


@operating_app.command(epilog="Example: fastdeploy-cache pins")
@spread
def pins(cache: RunningCache) -> None:
    """Show what is pinned, and for how long.

    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import pins_table

    found = cache.look("pins")
    cache.show(found, lambda: pins_table(found) if found else "nothing is pinned")


@operating_app.command(epilog="Example: fastdeploy-cache policy lfu")
@spread
def policy(
    cache: RunningCache, name: Annotated[str | None, typer.Argument(help="Evict by this one from now on.")] = None
) -> None:
    """Show the eviction policy, or set another one. What is cached stays, and how often it was used is known on.

    Exit status 0: done; 1: refused; 3: nobody listens there.
    """
    found = cache.look("policy") if name is None else cache.look("set-policy", name=name)
    known = ", ".join(found["known"])
    cache.show(found, lambda: f"{found['name']} (configured: {found['configured']}; known: {known})")


@dataclass(frozen=True)
class SessionHints:
    """What a hint says beside the session."""

    namespace: Annotated[str, typer.Option(help="In which its requests are.")] = ""
    seconds: Annotated[float, typer.Option(min=0.001, max=604800, help="retain: for so long, from now on.")] = 600.0
    keep_tokens: Annotated[int, typer.Option(min=0, help="supersede: so many in front stay.")] = 0
    tier: Annotated[str, typer.Option(help="prefetch: to cpu or gpu.")] = "gpu"


@operating_app.command(epilog="Example: fastdeploy-cache session prefetch task-17 --tier gpu")
@spread
def session(
    cache: RunningCache,
    hint: Annotated[str, typer.Argument(help="retain, release, supersede, demote or prefetch.")],
    name: Annotated[str, typer.Argument(metavar="SESSION", help="The session_id of its requests.")],
    how: SessionHints,
) -> None:
    """Say what will become of a session: keep it, let it go, move it down, or bring it back before it asks.

    Exit status 0: done; 1: refused, or such a session is not known; 3: nobody listens there.
    """
    of = {"session": name, "namespace": how.namespace}
    if hint == "retain":
        kept = cache.look("retain", **of, seconds=how.seconds)
        cache.show(kept, lambda: f"kept: {counted(kept['num_tokens'], 'token')}, for {duration(how.seconds)}")
    elif hint == "prefetch":
        found = cache.look("prefetch", **of, tier=how.tier)
        there, coming = (counted(found[f"num_{each}_tokens"], "token") for each in ("gpu", "cpu"))
        cache.show(found, lambda: f"on the GPU: {there}; in the CPU tier: {coming}; to {how.tier}")
    elif hint in _FREEING:
        more = {"num_tokens": how.keep_tokens} if hint == "supersede" else {}
        found = cache.look(_FREEING[hint], **of, **more)
        cache.show(found, lambda: f"{hint}: {counted(found['num_blocks'], 'block')}")
    else:
        raise typer.BadParameter(f"{hint!r}; use retain, release, supersede, demote or prefetch")


@operating_app.command("what-if", epilog="Example: fastdeploy-cache what-if")
@spread
def what_if(cache: RunningCache) -> None:
    """Show what the last hour would have hit with other sizes of each tier: whether more memory would pay.

    It is known after 10 requests, counted from the first metrics endpoint or the first such look on.
    Exit status 0: shown; 1: it cannot be asked; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import WHAT_IF_NOT_KNOWN, what_if_table

    found = cache.look("what-if")
    cache.show(found, lambda: what_if_table(found) if found else WHAT_IF_NOT_KNOWN)


@operating_app.command(epilog="Example: fastdeploy-cache flight last.flight")
@spread
def flight(
    cache: RunningCache,
    file: Annotated[Path | None, typer.Argument(help="Where to, or a folder; else insight.flight_folder.")] = None,
) -> None:
    """Write what the flight recorder of a running cache has kept. The file goes to the machine of that cache.

    Exit status 0: written; 1: refused, or it cannot be written; 3: nobody listens there.
    """
    wanted = str(file.absolute()) if file is not None else None
    found = cache.look("write-flight", file=wanted)
    path = found["file"]
    cache.show(found, lambda: f"written to {path}; look at it with: fastdeploy-cache simulate --replay {path}")


@operating_app.command(epilog="Example: fastdeploy-cache verify")
@spread
def verify(
    cache: RunningCache,
    checksums: Annotated[bool, typer.Option("--checksums", help="Say of bytes, too, what is checked.")] = False,
) -> int:
    """Check that the books of a running cache add up. It stands still meanwhile: 3 seconds for a million blocks.

    Exit status 0: they do; 1: it cannot be asked; 3: nobody listens there; 4: they do not.
    """
    found = cache.look("verify", checksums=checksums)
    lines = [f"checked: {text}" for text in found["checked"]]
    lines += [f"not checked: {text}" for text in found["not_checked"]]
    problem = found["problem"]
    lines.append(f"all hold ({duration(found['seconds'])})" if problem is None else f"BROKEN: {problem}")
    cache.show(found, lambda: lines)
    return 0 if problem is None else SOMETHING_IS_WRONG


@operating_app.command(epilog="Example: fastdeploy-cache explain --last 3")
@spread
def explain(
    cache: RunningCache,
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", help="Its X-Request-ID, the id in its answer's body, or that in the log."),
    ] = None,
    last: Annotated[int, typer.Option(min=1, max=100, help="Without an id: so many of the last requests.")] = 1,
) -> None:
    """Show where the prompt tokens of a request came from, and why the others did not.

    Exit status 0: shown; 1: the cache does not remember such a request; 3: nobody listens there.
    """
    if request_id is None:
        found = cache.look("explain-last", num_requests=last)
    else:
        found = cache.look("explain", request_id=request_id)
    _show_texts(cache, found, "no request has been admitted yet")


@operating_app.command(epilog="Example: fastdeploy-cache doctor")
@spread
def doctor(
    cache: RunningCache,
    metrics: Annotated[
        str | None, typer.Option(metavar="FILE_OR_URL", help="Go by a page of metrics, where only that can be reached.")
    ] = None,
    recording: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Go by a file of the flight recorder, which is replayed.")
    ] = None,
) -> int:
    """Say what is wrong with a running cache: the evidence, what to change, and what that can give.

    Exit status 0: nothing is; 1: it cannot be asked; 3: nobody listens there; 4: something is wrong.
    """
    if metrics is not None and recording is not None:
        raise typer.BadParameter("--metrics with --recording; give one of them")
    if metrics is not None:
        from fastdeploy_cache.launch.operating.doctor import findings_of_page

        found = findings_of_page(metrics)
    elif recording is not None:
        from fastdeploy_cache.launch.operating.doctor import findings_of_recording

        found = findings_of_recording(recording)
    else:
        found = cache.look("examine")
    _show_texts(cache, found, "nothing is wrong, as far as can be seen")
    return SOMETHING_IS_WRONG if found else 0


def _show_texts(cache: RunningCache, found: list[dict[str, Any]], otherwise: str) -> None:
    texts = [each.pop("text") for each in found]
    cache.show(found, lambda: texts or otherwise)


@dataclass(frozen=True)
class ListenOptions:
    """How to listen."""

    replay_endpoint: Annotated[str | None, typer.Option(help="Its `events.replay_endpoint`, where it has one.")] = None
    topic: Annotated[str, typer.Option(help="Its `events.topic`.")] = ""
    keys_folder: Annotated[Path | None, typer.Option(help="Own keys, with the publisher's among `trusted/`.")] = None
    seconds: Annotated[float | None, typer.Option(min=0.1, max=86400, help="Stop after these; else at Ctrl-C.")] = None
    as_json: Annotated[bool, typer.Option("--json", help="A line of JSON for each, with all that it says.")] = False


@operating_app.command(epilog="Example: fastdeploy-cache events tcp://127.0.0.1:5557")
@spread
def events(
    endpoint: Annotated[str, typer.Argument(help="Where a cache publishes: its `events.endpoint`.")],
    options: ListenOptions,
) -> None:
    """Print how much a cache has, and then what it tells of its blocks, as it comes.

    Exit status 0: the time is over; 1: nobody publishes there within ten seconds.
    """
    from fastdeploy_cache.launch.operating.events import listen

    listen(endpoint, options)


@operating_app.command("control", epilog="Example: fastdeploy-cache control pause")
@spread
def control_cache(
    cache: RunningCache,
    verb: Annotated[str, typer.Argument(help="pause, resume, sleep, wake, clear, update-weights or restart-rank.")],
    name: Annotated[
        str | None,
        typer.Argument(
            help="update-weights: the new name of the weights; needed with storage. "
            "restart-rank: the number of a rank that is down; all of them without it."
        ),
    ] = None,
    tier: Annotated[list[str] | None, typer.Option(help="sleep: gpu or cpu alone; both without it.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds that it may take, up to 600.")] = 30.0,
) -> None:
    """Pause, resume, put to sleep, wake or clear a running cache, tell it of new weights, or start its ranks that are
    down; print how it is then.

    Exit status 0: done; 1: refused or failed; 3: nobody listens there.
    """
    from fastdeploy_cache.launch.operating.text import done_text, restarted_line

    _check_control(verb, name, tier, timeout)
    if verb == _RESTART:
        found = cache.look(verb, rank=None if name is None else int(name))
        cache.show(found, lambda: restarted_line(found["ranks"]))
        return
    given = {"tiers": tier or None, "weights_id": name}
    fields = {name: value for name, value in given.items() if value is not None}
    status = cache.ask(verb, timeout, **fields)
    cache.show({"status": status}, lambda: done_text(verb, name, tier or []) + status)


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
