"""What a test may leave behind: processes, descriptors, files in /dev/shm."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path


def child_pids() -> set[int]:
    """Processes whose parent is this one, zombies included."""
    found, again = _children(), _children()
    while found != again:  # the kernel may leave one out while another is being reaped
        found, again = again, _children()
    return found


def _children() -> set[int]:
    """What each thread has started; the kernel lists it by thread."""
    words = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            words += (thread / "children").read_text().split()
    return set(map(int, words))


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
    """Files in /dev/shm, whosever they are."""
    return set(Path("/dev/shm").iterdir())


def new_shm_files(before: set[Path]) -> set[Path]:
    """Those that were not there before, but for those of other living programs, tests that run beside these among
    them."""
    return {path for path in shm_files() - before if not _is_others(path)}


def _is_others(path: Path) -> bool:
    """Whether its name ends with the number of a Python process that is none of ours, or a process that is none of ours
    has it mapped, or it is gone by now."""
    family = {os.getpid(), *child_pids()}
    number = re.search(r"\d+$", path.name)
    try:
        found = path.stat()
    except FileNotFoundError:
        return True
    # By its number: a semaphore is mapped under another name, which it had while it was made.
    place = f"{os.major(found.st_dev):02x}:{os.minor(found.st_dev):02x} {found.st_ino} "
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if int(process.name) in family:
                continue
            named = number is not None and number[0] == process.name and b"python" in (process / "cmdline").read_bytes()
            if named or place in (process / "maps").read_text():
                return True
        except OSError:
            continue
    return False


def num_descriptors() -> int:
    """Open descriptors of every kind, files included."""
    return len(list(Path("/proc/self/fd").iterdir()))
