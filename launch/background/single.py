"""One server in the background: started, looked at, ended."""

from __future__ import annotations

import os
import signal
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

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
                facts = program.wait_ready(START_SECONDS, asked, say)
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
        if (pidfd := slot.open()) is not None:
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


def http_status(url: str) -> int | None:
    """The number that a request is answered with; None where nobody answers."""
    try:
        if not url.startswith("http://"):  # no file, nor what else there is
            return None
        with urllib.request.urlopen(url, timeout=_ASK_SECONDS) as answer:  # noqa: S310 (our server's)
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def _signal(pidfd: int, number: int) -> None:
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
