"""When a process started: its number may be another one's tomorrow, number and start together are not."""

from __future__ import annotations

from pathlib import Path


def started_ticks(pid: int) -> int:
    """When the process began, in clock ticks since boot; 0: there is no such process.

    Source: proc(5), /proc/PID/stat, field 22.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
