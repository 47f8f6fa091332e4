"""All that the file store asks of the operating system, in one place: a test puts a disk that loses writes here."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from fastdeploy_cache.errors import StorageError, StorageRefusedError

_MAX_BUFFERS = 1024  # IOV_MAX of Linux
FOR_THE_USER = {
    *(errno.EEXIST, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.ENOTDIR, errno.ENOTEMPTY, errno.EPERM),
}
Identity = tuple[int, int]


class Disk:
    """Files by descriptor. Every method may raise OSError; any thread may call. What is written survives a loss
    of power from `sync` of its file on, a name in a folder from `sync_folder` on.

    Only what this user owns is opened, and no link is followed: others could else have us read, write and cut files
    that are not the store's.
    """

    def make_folder(self, path: Path) -> None:
        """Make it and what is missing above; for the owner's eyes, as blocks tell of prompts."""
        missing = [path]
        while (parent := missing[-1].parent) != missing[-1] and mode_at(parent, follow_links=True) is None:
            missing.append(parent)
        try:
            for folder in reversed(missing):
                _make_folder(folder, 0o700 if folder == path else 0o777)
        except (FileExistsError, NotADirectoryError) as error:
            raise _no_folder(path, error) from error

    def check_folder(self, path: Path, *, may_be_link: bool = False) -> None:
        """Raise EPERM where a folder is not this user's, or others can put files into it; ELOOP where it is a link."""
        fd = _open(path, os.O_RDONLY | os.O_DIRECTORY, may_be_link=may_be_link)
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if found.st_uid != os.geteuid():
            text = (
                f"the folder is of user {found.st_uid}, and this is user {os.geteuid()}; use one of your own or one "
                "that does not exist yet, or run as that user"
            )
            raise PermissionError(errno.EPERM, text, str(path))
        if found.st_mode & 0o022:
            mode = stat.S_IMODE(found.st_mode)
            is_shared = mode & stat.S_ISVTX  # such as /tmp: it is meant for everybody, and has to stay so
            own = "name a folder of your own"
            remedy = f"{own}, such as a new one in it" if is_shared else f"chmod go-w it, or {own}"
            text = f"others can write to the folder, its mode is {mode:o}; {remedy}"
            raise PermissionError(errno.EPERM, text, str(path))

    def open(self, path: Path, *, create: bool = False) -> int:
        """A descriptor for reading and writing."""
        return _open_own_file(path, os.O_RDWR | (os.O_CREAT if create else 0))

    def open_to_read(self, path: Path) -> int:
        """A descriptor for reading."""
        return _open_own_file(path, os.O_RDONLY | os.O_NONBLOCK)  # else a pipe of that name would hold us up

    def close(self, fd: int) -> None:
        """Give a descriptor back, and the lock that it holds."""
        os.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of an open file."""
        return os.fstat(fd).st_size

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Fill the buffers from there on, one behind the other. A file that ends before is an EIO."""
        while buffers:
            num = os.preadv(fd, buffers[:_MAX_BUFFERS], offset)
            if len(buffers) == 1 and num == buffers[0].nbytes:  # what is read in many pieces comes by here
                return
            if not num:
                raise OSError(errno.EIO, f"the file ends at {offset}")
            offset += num
            buffers = _behind(buffers, num)

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write the buffers from there on, one behind the other."""
        while buffers:
            num = os.pwritev(fd, buffers[:_MAX_BUFFERS], offset)
            offset += num
            buffers = _behind(buffers, num)

    def allocate(self, fd: int, size: int) -> None:
        """Give a file this size, with room on the disk for all of it."""
        os.posix_fallocate(fd, 0, size)

    def truncate(self, fd: int, size: int) -> None:
        """Cut a file."""
        os.ftruncate(fd, size)

    def sync(self, fd: int) -> None:
        """Make a file's bytes and size durable."""
        os.fdatasync(fd)

    def sync_folder(self, path: Path) -> None:
        """Make the names in a folder durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def rename(self, old: Path, new: Path) -> None:
        """Put a file in another's place."""
        old.replace(new)

    def remove(self, path: Path) -> None:
        """Remove a file, where it is there."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove an empty folder."""
        path.rmdir()

    def lock(self, fd: int) -> bool:
        """Take a file for this descriptor alone, if nobody has it; its end gives it back, however it comes."""
        return _flock(fd, fcntl.LOCK_EX)

    def lock_shared(self, fd: int) -> bool:
        """Whether nobody has taken the file; holds off who would take it until the descriptor is closed."""
        return _flock(fd, fcntl.LOCK_SH)

    def identity(self, path: Path) -> Identity | None:
        """Which file has this name now; None: none has."""
        try:
            found = path.lstat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_dev, found.st_ino

    def identity_of(self, fd: int) -> Identity:
        """Which file a descriptor is of."""
        found = os.fstat(fd)
        return found.st_dev, found.st_ino


def storage_error(what: str, error: OSError) -> StorageError:
    """What the disk says as an error of ours: `StorageRefusedError` where only the user can mend it."""
    kind = StorageRefusedError if error.errno in FOR_THE_USER else StorageError
    path, reason = error.filename, error.strerror or str(error)
    is_named = path is None or what.endswith((str(path), repr(str(path))))
    return kind(f"could not {what}: {reason}" if is_named else f"could not {what}: {reason} ({path})")


def mode_at(path: Path, *, follow_links: bool = False) -> int | None:
    """The mode of what has this name, or of what a link of this name leads to; None: nothing. Raises OSError.

    `Path.exists`, `is_dir` and `mkdir(exist_ok=True)` do not tell what is not there from a disk that cannot be read,
    since Python 3.14: a folder would be taken for a file, and its store refused for good.
    """
    try:
        return path.stat(follow_symlinks=follow_links).st_mode
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno != errno.ELOOP:  # links that lead to each other lead to nothing
            raise
        return None


def is_file(path: Path) -> bool:
    """Whether a file has this name, or a link to one. Raises OSError."""
    return stat.S_ISREG(mode_at(path, follow_links=True) or 0)


def is_folder(path: Path, *, follow_links: bool = False) -> bool:
    """Whether a folder has this name. Raises OSError."""
    return stat.S_ISDIR(mode_at(path, follow_links=follow_links) or 0)


def matching(folder: Path, pattern: str) -> list[Path]:
    """What in a folder is called so; nothing where there is no folder. Raises OSError, which `Path.glob` does not do
    since Python 3.13."""
    try:
        return [path for path in folder.iterdir() if fnmatchcase(path.name, pattern)]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_folder(path: Path, mode: int) -> None:
    try:
        path.mkdir(mode)
    except FileExistsError:  # another process was first, or it is a file
        if not is_folder(path, follow_links=True):
            raise


def _no_folder(path: Path, error: OSError) -> OSError:
    """The error of a folder that cannot be made, with what is in its place or above it."""
    modes = {each: mode_at(each) for each in (path, *path.parents)}
    found = next((each for each, mode in modes.items() if mode is not None), path)
    kind = "a link that leads to no folder" if stat.S_ISLNK(modes[found] or 0) else "a file"
    text = f"{'it' if found == path else repr(str(found))} is {kind}; name a folder, or one that does not exist yet"
    return type(error)(error.errno, text, str(path))


def _open(path: Path, flags: int, *, may_be_link: bool = False) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC | (0 if may_be_link else os.O_NOFOLLOW), 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENOTDIR) and not may_be_link and path.is_symlink():
            text = "it is a link, and the store follows none; put what it leads to in its place, or remove it"
            raise OSError(errno.ELOOP, text, str(path)) from error
        raise


def _open_own_file(path: Path, flags: int) -> int:
    fd = _open(path, flags)
    found = os.fstat(fd)
    if found.st_uid == os.geteuid() and stat.S_ISREG(found.st_mode):
        return fd
    os.close(fd)
    text = f"it is no file of user {os.geteuid()}, but of user {found.st_uid}; remove it"
    if not stat.S_ISREG(found.st_mode):
        text = f"it is a {'folder' if stat.S_ISDIR(found.st_mode) else 'pipe or device'}, and no file; move it away"
    raise PermissionError(errno.EPERM, text, str(path))


def _flock(fd: int, kind: int) -> bool:
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _behind(buffers: Sequence[memoryview], num: int) -> Sequence[memoryview]:
    """What is left of the buffers behind their first `num` bytes."""
    for i, buffer in enumerate(buffers):
        if num < buffer.nbytes:
            return [buffer[num:], *buffers[i + 1 :]]
        num -= buffer.nbytes
    return []
