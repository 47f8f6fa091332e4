"""Sections of the report on CUDA that go wrong, each in its own way."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.gpu.notes import GpuOptions, Notes


def right(notes: Notes, options: GpuOptions) -> None:
    """Nothing is wrong."""
    notes.note("all", "is well")


def environment(notes: Notes, options: GpuOptions) -> None:
    """A GPU that others may go on with."""
    notes.fact("num_gpus", 1)
    notes.note("driver", "of this test")


def hang(notes: Notes, options: GpuOptions) -> None:
    """It has found something, has started processes, one in a session of its own, and never ends."""
    command = [sys.executable, "-c", "import threading; threading.Event().wait()"]
    child, apart = subprocess.Popen(command), subprocess.Popen(command, start_new_session=True)
    notes.note("before", f"{child.pid} {apart.pid}")
    try:
        threading.Event().wait()
    finally:
        apart.kill()


def crash(notes: Notes, options: GpuOptions) -> None:
    """As a driver's library would."""
    notes.note("before", "was well")
    os.kill(os.getpid(), signal.SIGSEGV)


def stumble(notes: Notes, options: GpuOptions) -> None:
    """An error that nobody has thought of."""
    raise KeyError("no such thing")


def find_fault(notes: Notes, options: GpuOptions) -> None:
    """A check that does not hold, and one behind it that does."""

    def look() -> str:
        raise LaunchError("3 of 4 bytes differ")

    notes.check("bytes", look)
    notes.check("others", lambda: "are right")


def blind(notes: Notes, options: GpuOptions) -> None:
    """A driver is here, and nothing to ask it with."""
    notes.fact("num_gpus", 0)
    notes.fact("has_libcuda", True)


def without_driver(notes: Notes, options: GpuOptions) -> None:
    """Neither a driver nor anything to ask it with."""
    notes.note("driver", "no such driver", outcome="wrong")
