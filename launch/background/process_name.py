"""A name for a process that no other one will ever have: its pid, when it was started, and since which boot.

A pid alone is given again, to anybody's process. A name is what pid files and locks hold.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

_NAME = re.compile(r"([0-9]{1,9}) ([0-9]{1,20} [0-9a-f-]{36})\s*")
_STATE, _STARTED = 0, 19  # of what follows the command's name in /proc/PID/stat: its fields 3 and 22
_ENDED = ("Z", "X")


def name_of(pid: int) -> str:
    """What a process is called. Raises `ProcessLookupError` where it has ended."""
    started = _started(pid)
    if started is None:
        raise ProcessLookupError(f"no process {pid}")
    return f"{pid} {started}"


def pid_of(name: str) -> int | None:
    """The pid of the process of that name, if it lives."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found is not None and _started(int(found[1])) == found[2] else None


def open_process(name: str) -> int | None:
    """A pid descriptor of the process of that name, if it lives: a signal through it reaches no other one."""
    pid = pid_of(name)
    if pid is None:
        return None
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return None
    if pid_of(name) is not None:  # it may have ended, and its pid been given again, before it was opened
        return pidfd
    os.close(pidfd)
    return None


def _started(pid: int) -> str | None:
    """When it was started, in ticks since the machine's start, and which start that was; None where it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].decode().split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    return None if fields[_STATE] in _ENDED else f"{fields[_STARTED]} {boot}"
