"""A group in the background, as the command line starts, shows and ends it."""

from __future__ import annotations

from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.launch.background.group_plan import ROUTER, GroupPlan, discovery_file, secret_file
from fastdeploy_cache.launch.background.program import START_SECONDS, STOP_SECONDS, EndSignals, Program
from fastdeploy_cache.launch.background.run_folder import RunFolder, Slot
from fastdeploy_cache.launch.background.single import NOT_ANSWERING, NOT_RUNNING, Say, death, end_all, http_status


def start_group(plan: GroupPlan, folder: RunFolder, say: Say) -> None:
    """Start a supervisor with the group, and wait until the router answers. All of it starts, or nothing.

    Raises:
        LaunchError: it runs already, or a member cannot start: the end of its log says why.
        KeyboardInterrupt: this process was asked to end meanwhile, and so was the group.
    """
    with folder.locked("group"), EndSignals() as asked:
        if any(slot.pid is not None for slot in (folder.group, *folder.members)):
            raise LaunchError("already running; see `up --status`, or end it with `up --stop`")
        end_all(folder.members, say)  # pid files of a group that died
        say(f"starting {plan.num_prefill} prefill and {plan.num_decode} decode (logs: {folder.log_folder})")
        sockets = PrivateDirectory()
        command = ["up", "--foreground", "--run-dir", str(folder.path), *plan.words()]
        try:
            with Program(folder.group, command, sockets.path) as program:
                facts = program.wait_ready(2 * START_SECONDS, asked, say)
        finally:
            sockets.remove()
    for slot in folder.members:
        if slot.name != ROUTER:
            say(f"{slot.name}: {slot.facts['url']}, metrics {slot.facts.get('metrics')}")
    say(f"ready: API {facts['url']}/v1/chat/completions")


def stop_group(folder: RunFolder, say: Say) -> None:
    """SIGTERM, then SIGKILL after 30 seconds. A start that is at work is ended first.

    Raises:
        LaunchError: not all of it ended by itself.
    """
    with folder.locked_to_stop("group", STOP_SECONDS, say):
        slots = [folder.group, *folder.members]
        has_run, without = any(slot.pid is not None for slot in slots), _absence(folder)
        has_killed = end_all([folder.group], say)  # it ends its members
        has_killed |= end_all(folder.members, say)  # of one that was killed
        for file in (secret_file(folder), discovery_file(folder)):
            file.unlink(missing_ok=True)
    if has_killed:
        raise LaunchError("not all of it ended by itself")
    say("stopped" if has_run else without)


def show_group(folder: RunFolder, say: Say) -> int:
    """Each member and where it listens; returns the exit status."""
    document, status = describe_group(folder)
    if status == NOT_RUNNING:
        say(_absence(folder))
        return status
    for name, each in document["members"].items():  # and no other: one may have come since
        say(_line_of(folder.member(name), each["state"]))
    if not document["is_watched"]:
        say("nobody watches over it: its supervisor was killed; end the rest with `up --stop`")
    return status


def _absence(folder: RunFolder) -> str:
    """What to say where no group runs."""
    single = "; a single server is: see `status`, or end it with `stop`" if folder.server.pid is not None else ""
    return f"not running{death(folder.group)}{single}"


def describe_group(folder: RunFolder) -> tuple[dict[str, Any], int]:
    """The same for programs: `is_watched` by its supervisor, and each of `members` by name. Also the exit status."""
    members = {slot.name: {"pid": slot.pid, **slot.facts, "state": _state_of(slot)} for slot in folder.members}
    is_watched = folder.group.pid is not None
    document = {"is_watched": is_watched, "members": members}
    if not is_watched and not any(each["pid"] is not None for each in members.values()):
        return document, NOT_RUNNING
    is_whole = is_watched and all(each["state"] == "up" for each in members.values())
    return document, 0 if is_whole else NOT_ANSWERING


def _state_of(slot: Slot) -> str:
    """How a member is, in a word. Only one that is `up` takes requests."""
    if slot.pid is None:
        return "not_running"
    return {200: "up", 503: "not_ready"}.get(http_status(f"{slot.facts.get('url')}/ready") or 0, "not_answering")


def _line_of(slot: Slot, state: str) -> str:
    url, metrics = slot.facts.get("url"), slot.facts.get("metrics")
    not_ready = "no decode instance ready" if slot.name == ROUTER else "not ready: paused or asleep"
    lines = {
        "not_running": f"NOT RUNNING; its log is {slot.log_file}; it is started again by itself",
        "up": f"up, API {url}{f', metrics {metrics}' if metrics else ''}",
        "not_ready": f"up, {not_ready}, API {url}",
        "not_answering": f"DOES NOT ANSWER at {url}; its log is {slot.log_file}",
    }
    return f"{slot.name}: {lines[state]}"
