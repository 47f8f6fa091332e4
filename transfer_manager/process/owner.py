"""What a kind of process is, and what those who own its processes decide: the I/O thread knows neither."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fastdeploy_cache.transfer_manager.process.supervisor import Process
from fastdeploy_cache.transfer_manager.process.words import RankSignal


@dataclass(frozen=True, kw_only=True)
class ProcessKind:
    """How processes of one kind are held.

    Attributes:
        name: tells a rank's processes apart in the log.
        is_optional: they may come later: a failed start ends nothing, but for one that refuses its settings.
        in_order: a lane does its tasks one after the other; else side by side, each held to its own deadline.
    """

    name: str
    is_optional: bool = False
    in_order: bool = True


class ProcessOwner(Protocol):
    """Whoever has what the processes work on. Only the I/O thread calls it (but for `close`), and never waits in it.

    What has a body here is so where an owner says nothing else: all is there all the time, and nothing is noted.
    """

    signals: Sequence[RankSignal]  # the words of each rank's process

    def spawn(self, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> Process:
        """Start a process, which inherits `queue_fds`, its end of each lane.

        Raises `OSError`, `ValueError` or `IPCError` where that cannot be.
        """
        ...

    def may_run(self, rank: int) -> bool:  # noqa: ARG002
        """Whether all that a process of the rank works on is there. One that may not is not started."""
        return True

    def follow(self, rank: int) -> str | None:  # noqa: ARG002
        """What the rank's process works on has come or gone: why the one that runs must end, if it must."""
        return None

    def take_report(self, rank: int, report: bytes, num_restarts: int) -> str | None:  # noqa: ARG002
        """What a process says of itself when a lane is ready: why it must end, if it must."""
        return None

    def note_up(self, rank: int) -> None:  # noqa: ARG002
        """The rank's process is ready."""
        return

    def note_death(self, rank: int, failure: str, *, is_blamed: bool) -> None:  # noqa: ARG002
        """It is gone, and its tasks have ended. Not blamed: it was killed because what it worked on has gone, or
        could not start for want of descriptors, threads or memory, and is tried again."""
        return

    def note_stopped(self) -> None:
        """The thread ends: no process is left, or none that could be reaped."""
        return

    def close(self) -> None:
        """Give up what was shared with the processes. Called by the thread that stops them, once they have ended."""
        ...
