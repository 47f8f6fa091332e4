"""State words under a name in /dev/shm, for programs that find them by name.

The file and its bytes are those of `multiprocessing.shared_memory.SharedMemory(name="NAME.SUFFIX")`. No resource
tracker knows of it: the creator removes the name, and what a killed creator leaves is taken over by the next one.

Other programs make such files, too, and keep no lock on them: of these nobody can say whether their maker lives. So the
files that are made here have a mark, the sticky bit of their mode, which means nothing else for a file; and only a file
with the mark is ever replaced.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
from pathlib import Path
from typing import Any, Self

import numpy as np

from fastdeploy_cache.errors import IPCError, NotEnoughMemoryError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, seconds_to_wait
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shared_signal import SharedSignal

_FOLDER = Path("/dev/shm")  # noqa: S108 (where shared memory has its names)
_WORD_BYTES = 4
_MADE_HERE = stat.S_ISVTX  # of a file's mode: its holders keep the lock below
_MAX_TRIES = 10  # each one more means that somebody else made or removed the name in between
_LOOK_SECONDS = 0.1


class NamedSignal:
    """`num_words` signed 32-bit words in the file /dev/shm/NAME.SUFFIX, readable and writable by its owner alone.

    Every `NamedSignal` of a file keeps a shared lock (flock) on it, so that a file that was made here and has none is
    known to be left by a process that was killed. A lock is inherited by `fork`, not by `exec`. Any thread; a word has
    one writing process.
    """

    def __init__(self, path: Path, fd: int, num_words: int, is_creator: bool) -> None:
        """Take over `fd`, which is locked. Use `create` or `attach`."""
        self._path, self._is_creator = path, is_creator
        self._array = SharedArray(fd, num_words * _WORD_BYTES)
        self._signal = SharedSignal(self._array, num_words)
        self._words = self._array.view(np.int32, (num_words,))

    @classmethod
    def create(cls, name: str, suffix: int | str, num_words: int) -> Self:
        """New words, all 0. A file of that name that was made here, and that nobody holds, is replaced.

        Raises:
            IPCError: no possible name or size; somebody holds the name, or another program has made the file; it cannot
                be made.
            NotEnoughMemoryError: /dev/shm is full.
        """
        return cls._make(_path(name, suffix, num_words), num_words, may_attach=False)

    @classmethod
    def attach(cls, name: str, suffix: int | str, num_words: int) -> Self:
        """The words that another process has made; whether that process still lives is not asked.

        Raises:
            IPCError: there is no such file, it has another size, or it is not ours to write.
        """
        path = _path(name, suffix, num_words)
        for _ in range(_MAX_TRIES):
            fd = _open(path)
            if fd is None:
                raise IPCError(f"there is no {path}; start the process that makes it, or correct name and suffix")
            if (attached := cls._try_attach(fd, path, num_words)) is not None:
                return attached
        raise IPCError(f"{path} is being replaced by a new creator; attach again once that has started")

    @classmethod
    def attach_or_create(cls, name: str, suffix: int | str, num_words: int) -> Self:
        """The words that another program has made, where it has; else new ones, as `create` makes them.

        Words that were made here, and that a running process holds, are another owner's: these are refused.

        Raises:
            IPCError: as `create` and `attach`. NotEnoughMemoryError: /dev/shm is full.
        """
        return cls._make(_path(name, suffix, num_words), num_words, may_attach=True)

    @classmethod
    def _make(cls, path: Path, num_words: int, *, may_attach: bool) -> Self:
        for _ in range(_MAX_TRIES):
            found = cls._try_create(path, num_words)
            if found is None and (fd := _remove_stale(path)) is not None:
                if not may_attach:
                    os.close(fd)
                    what = f"{path} was made by another program, which may still use it"
                    raise IPCError(f"{what}; choose another suffix, or remove the file")
                found = cls._try_attach(fd, path, num_words)
            if found is not None:
                return found
        raise IPCError(f"{path} is made again and again by others; choose another suffix")

    @classmethod
    def _try_create(cls, path: Path, num_words: int) -> Self | None:
        """Make the words, or return None where the name is taken."""
        fd = _new_file(path, num_words * _WORD_BYTES)
        try:
            _publish(fd, path)
        except BaseException as error:
            os.close(fd)
            if isinstance(error, FileExistsError):
                return None
            raise
        return cls(path, fd, num_words, is_creator=True)

    @classmethod
    def _try_attach(cls, fd: int, path: Path, num_words: int) -> Self | None:
        """Open the words, or return None where the file is being removed, or has been replaced."""
        try:
            _check_size(fd, path, num_words)
            is_current = _lock(fd, fcntl.LOCK_SH) and _is_at(fd, path)
        except BaseException:
            os.close(fd)
            raise
        if is_current:
            return cls(path, fd, num_words, is_creator=False)
        os.close(fd)
        return None

    @property
    def words(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The words, int32 [num_words]; a plain store reaches waiters within 100 ms. Stays valid after `close`."""
        return self._words

    def set(self, index: int, value: int) -> None:
        """Store `value` and wake all who wait in `wait_change`, in any process."""
        self._signal.set(index, value)

    def wait_change(self, index: int, seen: int, timeout_seconds: float) -> int:
        """Sleep until the word is no longer `seen`; its value then, or `seen` when the time is over first.

        `set` ends the sleep at once. Other programs store without waking anybody, so it looks again every 100 ms.
        """
        deadline = SYSTEM_CLOCK.now() + seconds_to_wait("wait_change", timeout_seconds)
        unsigned = seen % 2**32
        while (value := int(self._words[index])) == seen and (left := deadline - SYSTEM_CLOCK.now()) > 0:
            self._signal.wait(index, lambda now: now != unsigned, min(left, _LOOK_SECONDS))
        return value

    def remove_name(self) -> None:
        """Remove the name, whoever has made the words. Nobody finds them any more; those who have them keep them."""
        fd = self._array.fd
        if fd >= 0 and _is_at(fd, self._path):  # not a file that came after somebody else removed ours
            self._path.unlink(missing_ok=True)

    def close(self) -> None:
        """Give up the lock and the mapping; the creator removes the name as well. Safe to call twice."""
        fd = self._array.fd
        if fd < 0:
            return
        if self._is_creator:
            self.remove_name()
        fcntl.flock(fd, fcntl.LOCK_UN)  # a mapping that views keep alive has a duplicate of the descriptor
        self._array.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _path(name: str, suffix: int | str, num_words: int) -> Path:
    file = f"{name}.{suffix}"
    if not name or "/" in file or "\0" in file or len(os.fsencode(file)) > 255:
        raise IPCError(f"{file!r} cannot be a name in {_FOLDER}; give at most 255 bytes without '/'")
    if num_words < 1:
        raise IPCError(f"{file!r} of {num_words} words; give at least 1")
    return _FOLDER / file


def _new_file(path: Path, num_bytes: int) -> int:
    """A file that has all but a name: locked, of its size, every page backed by memory."""
    try:
        fd = os.open(path.parent, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise IPCError(f"cannot make {path}: {error.strerror}; is {path.parent} a writable tmpfs?") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        os.fchmod(fd, 0o600 | _MADE_HERE)  # whatever the umask says
        os.posix_fallocate(fd, 0, num_bytes)
    except OSError as error:
        os.close(fd)
        raise NotEnoughMemoryError(f"{path} of {num_bytes} bytes: {error.strerror}; make room there") from error
    return fd


def _publish(fd: int, path: Path) -> None:
    """Give the file its name, unless the name is taken.

    The lock is held before anybody can open the file. Made under its name first and locked then, it would be seen
    without a lock, and too short, in between; another creator would take it for stale and remove it.
    """
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        # with folder descriptors Python calls linkat and follows the link in /proc; without, link, which does not
        os.link(f"/proc/self/fd/{fd}", path.name, src_dir_fd=folder, dst_dir_fd=folder)
    except FileExistsError:
        raise
    except OSError as error:
        raise IPCError(f"cannot make {path}: {error.strerror}") from error
    finally:
        os.close(folder)


def _remove_stale(path: Path) -> int | None:
    """Remove a file that was made here, unless somebody holds it. One of another program stays; its descriptor then.

    Two creators may find the same stale file: the first removes it and makes its own, and the second, which opened the
    old one before that, now gets the lock on it. Hence the comparison under the lock; while the lock is held no other
    creator removes that file.
    """
    fd = _open(path)
    if fd is None:
        return None
    if not os.fstat(fd).st_mode & _MADE_HERE:
        return fd
    try:
        if not _lock(fd, fcntl.LOCK_EX):
            raise IPCError(
                f"{path} is in use by a running process (see: fuser {path}); stop that one or choose another suffix"
            )
        if _is_at(fd, path):
            path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    return None


def _open(path: Path) -> int | None:
    """Open the file; None where there is none."""
    try:
        return os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise IPCError(f"cannot open {path}: {error.strerror}; remove it or choose another suffix") from error


def _check_size(fd: int, path: Path, num_words: int) -> None:
    num_bytes = os.fstat(fd).st_size
    if num_bytes != num_words * _WORD_BYTES:
        raise IPCError(
            f"{path} has {num_bytes} bytes, {num_words} words of {_WORD_BYTES} bytes expected; "
            "is its creator of another version?"
        )


def _lock(fd: int, kind: int) -> bool:
    """Whether the lock could be had without waiting."""
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(fd: int, path: Path) -> bool:
    """Whether the path still names the file behind the descriptor."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(fd), path.stat(follow_symlinks=False))
    return False
