"""Files in /dev/shm: which there are, which are in use, and how those go that killed processes of an engine leave."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

SHM = Path("/dev/shm")  # noqa: S108
# Of ours none may be left: to remove one here would hide it. So only files that have the engines' names are removed.
_ENGINE_NAMES = ("vllm_", "psm_", "sem.mp-", "sgl")


def shm_names() -> set[str]:
    """The names of all files there."""
    return {path.name for path in SHM.iterdir()} if SHM.is_dir() else set()


def is_held(name: str) -> bool:
    """Whether the file is there and a living process, other than this one, has it open or mapped.

    Processes of other users that this one may not look into count as not having it.
    """
    try:
        found = (SHM / name).stat()
    except FileNotFoundError:
        return False
    return any(_holds(process, found) for process in other_processes())


def other_processes() -> list[Path]:
    """The folders in /proc of all processes but this one."""
    return [path for path in Path("/proc").glob("[0-9]*") if path.name != str(os.getpid())]


def _holds(process: Path, file: os.stat_result) -> bool:
    """Whether it has this file, known by its inode: who makes a semaphore has it mapped under another name."""
    mapped = [f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}", str(file.st_ino)]
    with contextlib.suppress(OSError):  # it has ended, or is somebody else's
        if any(line.split()[3:5] == mapped for line in (process / "maps").read_text().splitlines()):
            return True
        for descriptor in (process / "fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                if os.path.samestat(descriptor.stat(), file):
                    return True
    return False


@contextlib.contextmanager
def engine_files_removed() -> Iterator[None]:
    """Remove what an engine that ran in this block, and was killed, has left in /dev/shm.

    These are the files that have an engine's name, came during the block, belong to this user, and are held by no
    living process. All processes of the engine must have ended at the end of the block.
    """
    before = shm_names()
    try:
        yield
    finally:
        for name in shm_names() - before:
            with contextlib.suppress(FileNotFoundError):
                is_own = (SHM / name).lstat().st_uid == os.getuid()
                if name.startswith(_ENGINE_NAMES) and is_own and not is_held(name):
                    (SHM / name).unlink()
