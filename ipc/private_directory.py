"""A folder of one process's sockets that nobody else may enter, and that no dead process leaves for long."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from pathlib import Path

_PREFIX = "fdc-"
_MIN_AGE_SECONDS = 60.0
_MAX_BASE_PATH = 80  # a socket address holds 108 bytes, our names take 20


class PrivateDirectory:
    """A new folder of mode 0700 below the temporary one. Making one removes those of processes that were killed."""

    def __init__(self) -> None:
        base = tempfile.gettempdir()
        if len(os.fsencode(base)) >= _MAX_BASE_PATH:
            base = "/tmp"  # noqa: S108 (mkdtemp: private, random name)
        _sweep(Path(base))
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        self._lock = _lock(self.path, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Delete it and what is in it; sockets that are connected stay so. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _lock(directory: Path, kind: int) -> int | None:
    """A descriptor that holds a lock of this kind on the directory, or None when it cannot be had."""
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


def _sweep(base: Path) -> None:
    """Remove what engines left that were killed while a rank was starting: nobody holds a lock on it any more.

    Young ones stay: another engine may be between making its directory and locking it.
    """
    for directory in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = directory.lstat()
            is_old = time.time() - status.st_mtime > _MIN_AGE_SECONDS
            if is_old and status.st_uid == os.getuid() and (fd := _lock(directory, fcntl.LOCK_EX)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(fd)
