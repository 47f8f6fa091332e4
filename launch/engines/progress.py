"""Whether a process still gets on: lines of its log, and processor time of all that it has started."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_LOOKS = 8  # in the time that may pass without progress
_LEAST_CPU_SECONDS = 1.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class StageLimits:
    """How long a process may be quiet, and how long it may take at all."""

    quiet_seconds: float = 120.0
    hard_seconds: float = 1_200.0


LIMITS = StageLimits()


class StageProgress:
    """What one process has done from now on. `log` is the file that its output goes to."""

    def __init__(self, pid: int, log: Path, limits: StageLimits) -> None:
        self._pid, self._log, self._limits = pid, log, limits
        self._started = self._last = time.monotonic()
        self._num_bytes, self._cpu_seconds = self._seen()

    @property
    def next_look_seconds(self) -> float:
        """When to look again."""
        left = self._started + self._limits.hard_seconds - time.monotonic()
        return max(0.0, min(left, self._limits.quiet_seconds / _LOOKS))

    def limit_reached(self) -> str:
        """Which limit it has reached, in words; "" while it gets on. To be asked every `next_look_seconds`."""
        now, (num_bytes, cpu_seconds) = time.monotonic(), self._seen()
        # one that ends takes its time along, so that less than before is a sign of life, too
        if num_bytes != self._num_bytes or abs(cpu_seconds - self._cpu_seconds) >= _LEAST_CPU_SECONDS:
            self._num_bytes, self._cpu_seconds, self._last = num_bytes, cpu_seconds, now
        if now - self._started >= self._limits.hard_seconds:
            return f"was ended at the hard limit of {self._limits.hard_seconds:.0f} s, although it still got on"
        if now - self._last >= self._limits.quiet_seconds:
            return (
                f"was ended, as {self._limits.quiet_seconds:.0f} s had passed without a line of its log or a second of "
                "processor time"
            )
        return ""

    def _seen(self) -> tuple[int, float]:
        return self._log.stat().st_size, sum(each.cpu_seconds for each in _tree_of(self._pid))


def wait_while_it_gets_on(process: subprocess.Popen[bytes], log: Path, limits: StageLimits) -> str:
    """Wait for its end. Returns `StageProgress.limit_reached` where it has reached a limit and still runs, else ""."""
    progress = StageProgress(process.pid, log, limits)
    while True:
        try:
            process.wait(progress.next_look_seconds)
        except subprocess.TimeoutExpired:
            if reached := progress.limit_reached():
                return reached
        else:
            return ""


@dataclass(frozen=True)
class ProcessState:
    """What /proc says of a process. Its processor time has that of its children that have ended."""

    pid: int
    state: str
    parent: int
    group: int
    session: int
    cpu_seconds: float


def processes() -> Iterator[ProcessState]:
    """All of this machine's, as far as they do not end meanwhile. Source: proc(5), /proc/PID/stat."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        ticks = sum(int(word) for word in words[11:15])
        parent, group, session = map(int, words[1:4])
        yield ProcessState(int(folder.name), words[0], parent, group, session, ticks / _TICKS_PER_SECOND)


def _tree_of(pid: int) -> list[ProcessState]:
    """A process, its session, and what these have started, also in sessions of their own."""
    left = list(processes())
    found: dict[int, ProcessState] = {}
    while fresh := [each for each in left if pid in (each.pid, each.session) or each.parent in found]:
        found.update({each.pid: each for each in fresh})
        left = [each for each in left if each.pid not in found]
    return list(found.values())
