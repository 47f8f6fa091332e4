"""This machine, as engines and their users see it, and what a process on it has."""

from __future__ import annotations

import contextlib
import ctypes
import os
import random
import signal
import threading
from collections.abc import Callable
from pathlib import Path

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK
from fastdeploy_cache.launch.engines.progress import processes

_PER_SECOND = 1000
_PR_SET_PDEATHSIG = 1
_SHARED = "/memfd:"


class RealHost:
    """See `Host`. Knows the threads and descriptors that the process had at first."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)  # noqa: S311 (nothing is kept secret)
        self.step_seconds = 1 / _PER_SECOND
        self.now, self.sleep = SYSTEM_CLOCK.now, SYSTEM_CLOCK.sleep
        self._threads: set[threading.Thread] = set()
        self._descriptors: set[str] = set()

    def note_own(self) -> None:
        """What is there now is not an engine's."""
        self._threads, self._descriptors = set(threading.enumerate()), set(descriptors())

    @property
    def num_steps(self) -> int:
        """Thousandths of seconds."""
        return int(self.now() * _PER_SECOND)

    def new_lock(self) -> contextlib.AbstractContextManager[object]:
        """See `Host`."""
        return threading.Lock()

    def new_guard(self) -> contextlib.AbstractContextManager[object]:
        """See `Host`."""
        return threading.Lock()

    def start_thread(self, name: str, run: Callable[..., object], *arguments: object) -> threading.Thread:
        """See `Host`."""
        thread = threading.Thread(target=run, name=name, args=arguments, daemon=True)
        thread.start()
        return thread

    def failing(self) -> contextlib.AbstractContextManager[None]:
        """See `Host`."""
        return contextlib.nullcontext()

    def is_planted(self, _: BaseException) -> bool:
        """See `Host`."""
        return False

    @property
    def num_planted(self) -> int:
        """See `Host`."""
        return 0

    def left_behind(self) -> dict[str, list[str]]:
        """See `Host`."""
        left = {
            "processes": [str(pid) for pid in children_of(os.getpid())],
            "descriptors": sorted(each for each in self._new_descriptors() if _SHARED not in each),
            "threads": [each.name for each in set(threading.enumerate()) - self._threads],
        }
        return {what: names for what, names in left.items() if names}

    def shared_memory(self) -> list[str]:
        """The descriptors of shared memory; each mapping has one, which lives as long as somebody looks through it."""
        return sorted(each for each in self._new_descriptors() if _SHARED in each)

    def _new_descriptors(self) -> set[str]:
        return set(descriptors()) - self._descriptors


def die_with_parent() -> None:
    """The kernel kills this process when the thread that has started it ends, also where it is stopped then."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def descriptors() -> list[str]:
    """Those of this process, with what each is of."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # that of the look itself
            found.append(f"{entry.name}: {entry.readlink()}")
    return found


def resident_bytes() -> int:
    """What this process has of the memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def children_of(pid: int) -> dict[int, list[str]]:
    """The living children of a process, with their command lines."""
    found = {}
    for each in processes():
        if each.parent == pid and each.state != "Z":
            with contextlib.suppress(OSError):  # it has ended meanwhile
                command = Path(f"/proc/{each.pid}/cmdline").read_bytes().decode(errors="replace")
                found[each.pid] = command.split("\0")
    return found
