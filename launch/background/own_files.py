"""Files and folders of this user alone: what they say decides which processes get a signal."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, Final

from fastdeploy_cache.errors import LaunchError

_MAX_BYTES: Final = 2**16  # of a file that is read: ours have a line
_CALM: Final = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK  # of what is there in a file's place nothing is waited for


def check_own_folder(folder: Path) -> None:
    """Whoever may write in it could say what we end, and where our logs go.

    Raises:
        LaunchError: it is there, and it is another user's, or others may write in it.
    """
    try:
        found = folder.lstat()
        if stat.S_ISLNK(found.st_mode) and found.st_uid == os.geteuid():  # our own link, to wherever we want
            found = folder.stat()
    except OSError:  # not there yet; where it cannot be looked at, it cannot be used either, and that is told then
        return
    hint = "choose another one with --run-dir"
    if found.st_uid != os.geteuid():
        raise LaunchError(f"run folder {folder} is of user {found.st_uid}, and this is {os.geteuid()}; {hint}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        mode = stat.S_IMODE(found.st_mode)
        raise LaunchError(f"others may write in the run folder {folder}, of mode {mode:o}; chmod go-w it, or {hint}")


def read_own(path: Path) -> str:
    """The text of a small file. Raises `OSError`, also where it is a link, and `ValueError` where it is no text."""
    with os.fdopen(os.open(path, os.O_RDONLY | _CALM), "rb") as file:
        return str(file.read(_MAX_BYTES).decode())


def write_own(path: Path, text: str) -> None:
    """Write a file anew. Raises `OSError`, also where a link is there."""
    with open_own(path, os.O_WRONLY | os.O_TRUNC) as file:
        file.write(text.encode())


def open_own(path: Path, flags: int) -> Any:
    """A file of bytes, which is made where there is none. Raises `OSError`, also where a link is there."""
    return os.fdopen(os.open(path, flags | os.O_CREAT | _CALM, 0o644), "r+b" if flags & os.O_RDWR else "wb")
