"""Runs a stage of an engine in a process of its own as long as it gets on, and leaves nothing of it behind."""

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
from fastdeploy_cache.launch.engines.progress import LIMITS, StageLimits, processes, wait_while_it_gets_on
from fastdeploy_cache.launch.shm_files import engine_files_removed

_END_SECONDS = 30.0
_TAIL_CHARACTERS = 3_000


def run_stage(
    module: str,
    plan: str,
    result: Path,
    *,
    log: Path,
    environment: Mapping[str, str] | None = None,
    limits: StageLimits = LIMITS,
    may_kill_itself: bool = False,
) -> bytes:
    """`python -m module plan`; returns what it has written to `result`. All its processes have ended then.

    Raises:
        LaunchError: it failed, or reached a limit; where its log lies and how that ends is in the message.
    """
    with engine_files_removed(), log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", module, plan],
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
        )
        try:
            reached = wait_while_it_gets_on(process, log, limits)
        finally:
            end_group(process)
    if reached:
        raise LaunchError(told(reached, log))
    status = process.returncode
    if not (status == 0 or (may_kill_itself and status == -signal.SIGKILL)):
        raise LaunchError(told(f"ended with status {status}", log))
    if not result.exists():
        raise LaunchError(told("ended without a result", log))
    return result.read_bytes()


def told(what: str, log: Path) -> str:
    """What became of a process, where its log lies, and how that ends."""
    end = log.read_text(errors="replace")[-_TAIL_CHARACTERS:] if log.exists() else ""
    return f"{log.stem} {what}; its log, {log}, ends:\n{end}"


def python_path(folder: Path) -> str:
    """This process's PYTHONPATH with a folder in front."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def made_up_prompts(lengths: Sequence[int], vocabulary: int, seed: int) -> list[list[int]]:
    """Tokens of prompts of these lengths, the same in every run."""
    chance = random.Random(seed)  # noqa: S311 (made-up prompts)
    return [[chance.randrange(5, vocabulary) for _ in range(length)] for length in lengths]


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
    return [each.pid for each in processes() if each.group == group and each.state != "Z"]
