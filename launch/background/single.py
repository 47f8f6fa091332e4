"""One server in the background: started, looked at, ended."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from typing import Any

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.launch.background.program import (
    END_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    EndSignals,
    Program,
    wait_ends,
)
from fastdeploy_cache.launch.background.run_folder import RunFolder, Slot

NOT_RUNNING, NOT_ANSWERING = 3, 4  # exit statuses
_ASK_SECONDS = 5.0

Say = Callable[[str], None]


def start(folder: RunFolder, arguments: Sequence[str], say: Say) -> None:
    """Start `serve` with these arguments and wait until it answers.

    Raises:
        LaunchError: one runs already, or it cannot start: the end of its log says why.
    """
    slot = folder.server
    with folder.locked("start"), EndSignals() as asked:
        if (pid := slot.pid) is not None:
            raise LaunchError(f"already running with pid {pid}; see `status`, or end it with `stop`")
        say(f"starting fastdeploy-cache serve {' '.join(arguments)} (log: {slot.log_file})")
        own = ["--log-dir", str(folder.log_folder), "--control-socket", str(folder.control_socket)]
        sockets = PrivateDirectory()
        try:
            with Program(slot, ["serve", *own, *arguments], sockets.path) as program:
                facts = program.wait_ready(START_SECONDS, asked)
        finally:
            sockets.remove()
    say(f"ready: pid {program.pid}, API {facts['url']}/v1/chat/completions, metrics {facts.get('metrics')}")


def stop(folder: RunFolder, say: Say) -> None:
    """SIGTERM, then SIGKILL after 30 seconds. A start that is at work is ended first.

    Raises:
        LaunchError: it had to be killed.
    """
    slot = folder.server
    with folder.locked_to_stop("start", STOP_SECONDS, say):
        pid, text = slot.pid, absence(folder)
        killed = end_all([slot], say)
    if pid is None:
        say(text)
        return
    if killed:
        raise LaunchError(
            f"pid {pid} did not end within {END_SECONDS:.0f} s and was killed; its log is {slot.log_file}"
        )
    say(f"stopped (pid {pid})")


def absence(folder: RunFolder) -> str:
    """What to say where no server runs: how it ended, and whether a group runs from the same folder."""
    text = f"not running{death(folder.server)}"
    if any(each.pid is not None for each in (folder.group, *folder.members)):
        text += "; a group is: see `up --status`, or end it with `up --stop`"
    return text


def death(slot: Slot) -> str:
    """What to add of one that was not stopped and does not run."""
    return f"; it ended without being stopped; its log is {slot.log_file}" if slot.has_died else ""


def end_all(slots: Sequence[Slot], say: Say) -> bool:
    """End what runs of these, in this order; whether one of them had to be killed."""
    opened = dict[Slot, int]()
    for slot in slots:
        if (pid := slot.pid) is not None and (pidfd := _open(pid)) is not None:
            opened[slot] = pidfd
            _signal(pidfd, signal.SIGTERM)
    has_killed = not wait_ends(list(opened.values()), END_SECONDS)
    for slot, pidfd in opened.items():
        if not wait_ends([pidfd], 0.001):
            say(f"{slot.name} did not end within {END_SECONDS:.0f} s and was killed; its log is {slot.log_file}")
            _signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    for slot in slots:
        slot.forget()
    return has_killed


def status(folder: RunFolder, say: Say, *, as_json: bool) -> int:
    """Show the server's ranks, tiers and hit rates; returns the exit status."""
    slot = folder.server
    pid, facts = slot.pid, slot.facts
    if pid is None:
        say(absence(folder))
        return NOT_RUNNING
    try:
        document = json.loads(get(f"{facts.get('url')}/status"))
    except (OSError, ValueError):
        say(f"running with pid {pid}, and it does not answer; its log is {slot.log_file}")
        return NOT_ANSWERING
    if as_json:
        say(json.dumps({"pid": pid, **facts, **document}, indent=2))
        return 0
    say(f"running: pid {pid}, API {facts['url']}/v1/chat/completions, metrics {facts.get('metrics')}")
    for line in _describe(document):
        say(line)
    return 0


def get(url: str) -> str:
    """What is there. Raises `OSError` where nobody answers, or with an error."""
    with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:  # noqa: S310 (our server's)
        return str(answer.read().decode())


def http_status(url: str) -> int | None:
    """The number that a request is answered with; None where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:  # noqa: S310 (our server's)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def _describe(document: dict[str, Any]) -> list[str]:
    lines = []
    if document["life_cycle"] != "running":
        lines.append(f"life cycle: {document['life_cycle']}")
    for rank in document["ranks"]:
        state = "up" if rank["up"] else "DOWN"
        lines.append(f"rank {rank['rank']}: {state}, pid {rank['pid']}, restarts {rank['num_restarts']}")
    for tier, states in document["tiers"].items():
        lines.append(f"{tier.upper()}: " + ", ".join(f"{count} {state}" for state, count in states.items()))
    if storage := document["storage"]:
        state = "open" if storage["available"] else "NOT OPEN"
        counts = [f"{count} blocks {fate}" for fate, count in storage["blocks"].items()]
        counts += [f"{count} objects {reason}" for reason, count in storage["lost_objects"].items() if count]
        breakers = ", ".join(f"{operation} breaker {state}" for operation, state in storage["breakers"].items())
        lines.append(f"storage: {state}; {', '.join(counts)}; {breakers}")
    rates = ", ".join(f"{name} {rate:.0%}" for name, rate in document["hit_rates"].items())
    return [*lines, f"hit rates, recently: {rates}", *_worth(document)]


def _worth(document: dict[str, Any]) -> list[str]:
    """What the cache has saved, and why it has not saved more; nothing before the first request."""
    lines, missed = [], {cause: count for cause, count in document["missed_tokens"].items() if count}
    if saved := sum(document["saved_seconds"].values()):
        lines.append(f"computing saved: {saved:.1f} seconds")
    if all_missed := sum(missed.values()):
        causes = sorted(missed.items(), key=lambda item: -item[1])
        lines.append("missed tokens: " + ", ".join(f"{cause} {count / all_missed:.0%}" for cause, count in causes))
    return lines


def _open(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _signal(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
