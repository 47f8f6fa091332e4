"""What the command `soak` does to real processes and files."""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.faults.real_host import children_of

_PACKAGE: Final = "fastdeploy_cache.transfer_manager"
_PROGRAMS: Final = {"rank": _PACKAGE, "storage": f"{_PACKAGE}.storage", "peer": f"{_PACKAGE}.peer"}
_STOP_SECONDS: Final = (0.2, 2.0, 8.0)  # the last is longer than a heart may be silent
_FLIPPED_BYTES: Final = 16


@dataclass(frozen=True)
class Targets:
    """What there is to hurt: the engines' processes and their store."""

    engines: Sequence[int]
    store: Path


@dataclass
class Stopped:
    """Processes that go on later, and engines that were killed: what else kills one is a finding."""

    until: dict[int, float]
    killed: set[int]

    def go_on(self, now: float) -> None:
        """Let those go on whose time has come."""
        for pid, at in list(self.until.items()):
            if now >= at:
                del self.until[pid]
                _send(pid, signal.SIGCONT)


SoakFault = Callable[[Targets, Stopped, random.Random], bool]  # whether there was anything to do it to


def _send(pid: int, number: signal.Signals) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _processes(targets: Targets, kind: str) -> list[int]:
    if kind == "engine":
        return list(targets.engines)
    children = [item for engine in targets.engines for item in children_of(engine).items()]
    return [pid for pid, command in children if _PROGRAMS[kind] in command]


def _kill(kind: str, *, everyone: bool = False) -> SoakFault:
    def happen(targets: Targets, stopped: Stopped, chance: random.Random) -> bool:
        pids = _processes(targets, kind)
        chosen = pids if everyone or not pids else [chance.choice(pids)]
        stopped.killed.update(chosen if kind == "engine" else ())
        return sum(_send(pid, signal.SIGKILL) for pid in chosen) > 0

    return happen


def _stop(kind: str) -> SoakFault:
    def happen(targets: Targets, stopped: Stopped, chance: random.Random) -> bool:
        pids = [pid for pid in _processes(targets, kind) if pid not in stopped.until]
        if not pids or not _send(pid := chance.choice(pids), signal.SIGSTOP):
            return False
        stopped.until[pid] = SYSTEM_CLOCK.now() + chance.choice(_STOP_SECONDS)
        return True

    return happen


def _flip_bits(targets: Targets, _: Stopped, chance: random.Random) -> bool:
    """A few bytes of a file of the store are not what was written any more."""
    with contextlib.suppress(OSError, IndexError):  # it has gone meanwhile; there is none
        files = sorted(path for path in targets.store.rglob("*") if path.is_file())
        with open(chance.choice(files), "r+b") as file:
            size = os.fstat(file.fileno()).st_size
            if size > _FLIPPED_BYTES:
                file.seek(chance.randrange(size - _FLIPPED_BYTES))
                file.write(chance.randbytes(_FLIPPED_BYTES))
                return True
    return False


SOAK_FAULTS: Final[dict[str, SoakFault]] = {
    "kill rank": _kill("rank"),
    "kill all ranks": _kill("rank", everyone=True),
    "stop rank": _stop("rank"),
    "kill storage": _kill("storage"),
    "stop storage": _stop("storage"),
    "flipped bits": _flip_bits,
    "kill peer": _kill("peer"),
    "stop peer": _stop("peer"),
    "kill engine": _kill("engine"),
    "stop engine": _stop("engine"),
}
