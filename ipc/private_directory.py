"""A folder of one process's sockets that nobody else may enter; a killed process's goes with the next start."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from fastdeploy_cache.errors import IPCError

_PREFIX = "fdc-"
_MAX_TRIES = 100
_MAX_BASE_PATH = 80  # a socket address holds 108 bytes, our names take 20


def temporary_folder() -> str:
    """Where temporary files go. Raises `OSError`: a shortage as such, which `tempfile` takes for a missing folder."""
    try:
        return tempfile.gettempdir()
    except FileNotFoundError:
        os.close(os.open("/", os.O_RDONLY | os.O_CLOEXEC))  # where there is one, it is met again
        raise


class PrivateDirectory:
    """A new folder of mode 0700 below the temporary one. Making one removes those of processes that were killed."""

    def __init__(self) -> None:
        base = temporary_folder()
        if len(os.fsencode(base)) >= _MAX_BASE_PATH:
            base = "/tmp"  # noqa: S108 (mkdtemp: private, random name)
        _sweep(Path(base))
        self.path, self._lock = _new_locked(base)

    def remove(self) -> None:
        """Delete it and what is in it; sockets that are connected stay so. Safe to call twice."""
        shutil.rmtree(self.path, ignore_errors=True)
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)


def _new_locked(base: str) -> tuple[Path, int | None]:
    """A new folder and the descriptor that holds its lock; None where the file system has no locks.

    Between making a folder and locking it another process may take it for a dead one's and remove it. So the lock
    counts only if the folder is still there once it is held; else another one is made.
    """
    for _ in range(_MAX_TRIES):
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=base))
        try:
            lock = _lock(path, fcntl.LOCK_SH)
        except (FileNotFoundError, BlockingIOError):  # removed, or about to be
            continue
        if lock is None:
            return path, None
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(lock), path.lstat()):
                return path, lock
        os.close(lock)
    raise IPCError(f"{_MAX_TRIES} new folders in {base} were removed at once; find out what removes {_PREFIX}* there")


def _lock(directory: Path, kind: int) -> int | None:
    """A descriptor that holds a lock of this kind on the directory; None where the file system has no locks.

    Raises:
        OSError: it cannot be opened; `BlockingIOError`: another process holds a lock that excludes this one.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return fd


def _sweep(base: Path) -> None:
    """Remove what engines left that were killed: nobody holds a lock on it any more."""
    for directory in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            if directory.lstat().st_uid == os.getuid() and (fd := _lock(directory, fcntl.LOCK_EX)) is not None:
                shutil.rmtree(directory, ignore_errors=True)
                os.close(fd)
