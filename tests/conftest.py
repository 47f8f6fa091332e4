"""Fixtures for all tests: nothing may be left behind."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest


def _children() -> set[int]:
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


def _handles() -> dict[str, str]:
    found = {}
    for link in Path("/proc/self/fd").iterdir():
        try:
            target = str(link.readlink())
        except OSError:
            continue
        if "anon_inode" in target or target.startswith(("socket", "pipe", "/memfd")):
            found[link.name] = target
    return found


def _is_others(path: Path) -> bool:
    """Whether a living process that is none of ours has a /dev/shm file mapped: another program made it."""
    family = {os.getpid(), *_children()}
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            if int(maps.parent.name) not in family and str(path) in maps.read_text():
                return True
        except OSError:
            continue
    return False


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, descriptors or /dev/shm files; `leaks_allowed` names the exceptions."""
    if "leaks_allowed" in request.keywords:
        yield
        return
    before = _children(), _handles(), set(Path("/dev/shm").iterdir())
    yield
    deadline = time.monotonic() + 3
    while True:
        gc.collect()
        left = (
            _children() - before[0],
            {fd: name for fd, name in _handles().items() if before[1].get(fd) != name},
            {path for path in set(Path("/dev/shm").iterdir()) - before[2] if not _is_others(path)},
        )
        if not any(left) or time.monotonic() > deadline:
            break
        time.sleep(0.05)  # a closed socket's descriptor goes in another thread
    assert not any(left), f"left behind: processes {left[0]}, handles {left[1]}, /dev/shm {left[2]}"
