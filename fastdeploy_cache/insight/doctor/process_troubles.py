"""Which processes are not there, and why: for `/ready`, `status` and the doctor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.client import RankStatus

KINDS = ("transfer", "storage", "peer")


class ProcessTrouble(NamedTuple):
    """A process that is not ready, though it has all that it works on. `reason`: empty where it is not known."""

    kind: str
    rank: int
    state: str  # see `ProcessHealth`
    reason: str = ""

    def __str__(self) -> str:
        reason = f": {self.reason}" if self.reason else ""
        return f"the {self.kind} process of rank {self.rank} {_WORDS[self.state]}{reason}"


_WORDS = {
    "starting": "is down, and is being started again",
    "short": "waits for descriptors, threads or memory",
    "off": "is off, since it has died too often",
}


def troubles_of(processes: Mapping[str, Sequence[RankStatus]]) -> list[ProcessTrouble]:
    """Those of these, by kind."""
    return [
        ProcessTrouble(kind, status.rank, status.state, status.shortage)
        for kind, statuses in processes.items()
        for status in statuses
        if not status.up and status.state in _WORDS
    ]
