"""Runs a stage of an engine in a process of its own, with a deadline, and leaves nothing of it behind."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.shm_files import engine_files_removed

_TIMEOUT_SECONDS = 400.0
_END_SECONDS = 30.0


def run_stage(
    module: str,
    plan: str,
    result: Path,
    *,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = _TIMEOUT_SECONDS,
    may_kill_itself: bool = False,
) -> bytes:
    """`python -m module plan`; returns what it has written to `result`. All its processes have ended then.

    Raises:
        LaunchError: it failed, or took too long; the end of its log is in the message.
    """
    log = result.with_suffix(".log")
    with engine_files_removed(), log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, plan],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            status = process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            end_group(process)
    if status is None:
        raise LaunchError(f"{result.stem} took more than {timeout_seconds:.0f} s:\n{tail(log)}")
    if not (status == 0 or (may_kill_itself and status == -signal.SIGKILL)) or not result.exists():
        raise LaunchError(f"{result.stem} ended with status {status}:\n{tail(log)}")
    return result.read_bytes()


def python_path(folder: Path) -> str:
    """This process's PYTHONPATH with a folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def made_up_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Tokens of prompts of these lengths, the same in every run."""
    chance = random.Random(seed)  # noqa: S311 (made-up prompts)
    return [[chance.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


def tail(log: Path) -> str:
    """The end of a log."""
    return log.read_text(errors="replace")[-3000:]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what is left of a process' group: an engine's workers may outlive it. They have ended when this returns."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()
    deadline = time.monotonic() + _END_SECONDS
    for pid in _living_members(process.pid):
        try:
            handle = os.pidfd_open(pid)
        except ProcessLookupError:
            continue
        try:
            select.select([handle], [], [], max(0.0, deadline - time.monotonic()))
        finally:
            os.close(handle)


def _living_members(group: int) -> list[int]:
    """A killed process holds its files for a moment longer. One that is only not yet reaped (Z) holds none."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, its_group = (folder / "stat").read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended
            continue
        if int(its_group) == group and state != "Z":
            found.append(int(folder.name))
    return found
