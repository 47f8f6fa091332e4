"""Processes that are stopped for sure."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

_SECONDS = 30.0


def stopped(pid: int) -> None:
    """SIGSTOP a process and return once the kernel has stopped each of its threads: from then on it does nothing.

    The signal reaches the threads one by one. A server asked right after it may still answer from another thread.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + _SECONDS
    while not all(_is_stopped(thread) for thread in Path(f"/proc/{pid}/task").iterdir()):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)  # nothing tells when the last thread has


def _is_stopped(thread: Path) -> bool:
    try:
        return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"
    except FileNotFoundError:  # it has ended
        return True
