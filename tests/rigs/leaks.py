"""What a test may leave behind: processes, descriptors, files in /dev/shm."""

from __future__ import annotations

import os
import re
from pathlib import Path


def child_pids() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def handles() -> dict[str, str]:
    """Descriptors of sockets, pipes, memory and their like, and what each is."""
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if "anon_inode" in target or target.startswith(("socket", "pipe", "/memfd")):
            found[link.name] = target
    return found


def shm_files() -> set[Path]:
    """Files in /dev/shm, but for those of other living programs, tests that run beside these among them."""
    return {path for path in Path("/dev/shm").iterdir() if not _is_others(path)}


def _is_others(path: Path) -> bool:
    """Whether its name ends with the number of a Python process that is none of ours, or such a one has it mapped."""
    family = {os.getpid(), *child_pids()}
    number = re.search(r"\d+$", path.name)
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) in family:
                continue
            named = number is not None and number[0] == process.name and b"python" in (process / "cmdline").read_bytes()
            if named or str(path) in (process / "maps").read_text():
                return True
        except OSError:
            continue
    return False


def num_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))
