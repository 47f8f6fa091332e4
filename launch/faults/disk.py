"""The simulated machine's disk: what processes see of it, and what is left of that when the power goes.

A write is seen by everybody at once, and survives every process. Only what was synced survives a loss of power for
sure; of the rest a part that is drawn survives, cut anywhere. Names follow the order in which they were changed.
"""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace

from fastdeploy_cache.launch.faults.open_files import OpenFile

_SECTOR_BYTES = 512


def _error(number: int, path: str = "") -> OSError:
    return OSError(number, os.strerror(number), path) if path else OSError(number, os.strerror(number))


Names = tuple[tuple[str, "File | Folder | None"], ...]  # that were set, or removed


@dataclass(eq=False)
class File:
    """The bytes of a file."""

    inode: int
    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    since: list[tuple[int, bytes] | int] = field(default_factory=list)  # writes and sizes that were not synced
    written_at: float = 0.0
    exclusive: OpenFile | None = None
    shared: dict[OpenFile, None] = field(default_factory=dict)

    def write(self, data: bytes, offset: int) -> None:
        """Put bytes there."""
        if len(self.data) < offset:
            self.data += bytes(offset - len(self.data))
        self.data[offset : offset + len(data)] = data
        self.since.append((offset, data))

    def resize(self, size: int) -> None:
        """Cut it, or add zeros."""
        del self.data[size:]
        self.data += bytes(size - len(self.data))
        self.since.append(size)

    def sync(self) -> None:
        """All of it is durable."""
        self.durable, self.since = bytes(self.data), []

    def lose_power(self, chance: random.Random) -> None:
        """What was not synced may be there, in part, or not."""
        left = bytearray(self.durable)
        for change in self.since:
            if isinstance(change, int):
                if chance.random() < 0.5:
                    del left[change:]
                    left += bytes(change - len(left))
                continue
            offset, data = change
            for start in range(0, len(data), _SECTOR_BYTES):
                if chance.random() < 0.5:
                    piece, at = data[start : start + _SECTOR_BYTES], offset + start
                    left += bytes(max(0, at - len(left)))
                    left[at : at + len(piece)] = piece
        self.data, self.durable, self.since = left, bytes(left), []
        self.exclusive, self.shared = None, {}


@dataclass(eq=False)
class Folder:
    """Names of files and folders."""

    inode: int
    entries: dict[str, File | Folder] = field(default_factory=dict)
    durable: dict[str, File | Folder] = field(default_factory=dict)
    since: list[Names] = field(default_factory=list)  # changes that were not synced: each happens whole, or not
    exclusive: OpenFile | None = None
    shared: dict[OpenFile, None] = field(default_factory=dict)

    def put(self, name: str, entry: File | Folder | None) -> None:
        """Give a name to something; None: to nothing."""
        self.change(((name, entry),))

    def change(self, names: Names) -> None:
        """Do it in one go."""
        _set(self.entries, names)
        self.since.append(names)

    def sync(self) -> None:
        """All names are durable."""
        self.durable, self.since = dict(self.entries), []

    def lose_power(self, chance: random.Random) -> None:
        """So many of the changes that were not synced are there, from the first on."""
        left = dict(self.durable)
        for names in self.since[: chance.randrange(len(self.since) + 1)]:
            _set(left, names)
        self.entries, self.durable, self.since = left, dict(left), []
        self.exclusive, self.shared = None, {}
        for entry in self.entries.values():
            entry.lose_power(chance)


class OpenDiskFile(OpenFile):
    """A descriptor of a file, or of a folder."""

    def __init__(self, entry: File | Folder) -> None:
        super().__init__()
        self.entry, self.inode = entry, entry.inode

    @property
    def size(self) -> int:
        return len(self.entry.data) if isinstance(self.entry, File) else 0

    def lock(self, *, is_shared: bool) -> bool:
        """See flock(2), without waiting."""
        file = self.entry
        others = [each for each in file.shared if each is not self]
        if file.exclusive not in (None, self) or (others and not is_shared):
            return False
        file.shared.pop(self, None)
        file.exclusive = None if is_shared else self
        if is_shared:
            file.shared[self] = None
        return True

    def end(self) -> None:
        file = self.entry
        file.shared.pop(self, None)
        file.exclusive = None if file.exclusive is self else file.exclusive


class SimulatedDisk:
    """A tree of folders. Paths are absolute; no call takes a step."""

    def __init__(self, new_inode: Callable[[], int], now: Callable[[], float], capacity_bytes: int) -> None:
        self.root, self._new_inode, self._now = Folder(new_inode()), new_inode, now
        self.capacity_bytes = capacity_bytes
        self.files: dict[File, None] = {}  # with room on the disk
        for name in ("tmp", "store"):
            self.make_folder(f"/{name}")
        self.root.sync()

    # -- names

    def find(self, path: str) -> File | Folder:
        """What has this name. Raises `OSError`."""
        entry: File | Folder = self.root
        for name in _names(path):
            if not isinstance(entry, Folder):
                raise _error(errno.ENOTDIR, path)
            if name not in entry.entries:
                raise _error(errno.ENOENT, path)
            entry = entry.entries[name]
        return entry

    def _place(self, path: str) -> tuple[Folder, str]:
        *above, name = _names(path)
        folder = self.find("/" + "/".join(above))
        if not isinstance(folder, Folder):
            raise _error(errno.ENOTDIR, path)
        return folder, name

    def make_folder(self, path: str) -> None:
        """Raises `OSError`."""
        folder, name = self._place(path)
        if name in folder.entries:
            raise _error(errno.EEXIST, path)
        folder.put(name, Folder(self._new_inode()))

    def open(self, path: str, flags: int) -> OpenDiskFile:
        """Raises `OSError`."""
        folder, name = self._place(path) if _names(path) else (self.root, "")
        entry = folder.entries.get(name) if name else self.root
        if entry is None:
            if not flags & os.O_CREAT:
                raise _error(errno.ENOENT, path)
            entry = File(self._new_inode(), written_at=self._now())
            self.files[entry] = None
            folder.put(name, entry)
        elif flags & os.O_EXCL:
            raise _error(errno.EEXIST, path)
        if flags & os.O_DIRECTORY and not isinstance(entry, Folder):
            raise _error(errno.ENOTDIR, path)
        if isinstance(entry, Folder) and flags & (os.O_RDWR | os.O_WRONLY):
            raise _error(errno.EISDIR, path)
        if isinstance(entry, File) and flags & os.O_TRUNC:
            entry.resize(0)
        return OpenDiskFile(entry)

    def nameless(self) -> OpenDiskFile:
        """A temporary file."""
        return OpenDiskFile(File(self._new_inode()))

    def rename(self, old: str, new: str) -> None:
        """Raises `OSError`."""
        entry = self.find(old)
        from_folder, old_name = self._place(old)
        to_folder, new_name = self._place(new)
        if from_folder is not to_folder:
            raise _error(errno.EXDEV, old)  # nothing of ours does that
        from_folder.change(((new_name, entry), (old_name, None)))

    def remove(self, path: str) -> None:
        """Remove a file. Raises `OSError`."""
        folder, name = self._place(path)
        entry = folder.entries.get(name)
        if entry is None:
            raise _error(errno.ENOENT, path)
        if isinstance(entry, Folder):
            raise _error(errno.EISDIR, path)
        folder.put(name, None)
        self.files.pop(entry, None)

    def remove_folder(self, path: str) -> None:
        """Remove an empty folder. Raises `OSError`."""
        folder, name = self._place(path)
        entry = folder.entries.get(name)
        if entry is None:
            raise _error(errno.ENOENT, path)
        if not isinstance(entry, Folder):
            raise _error(errno.ENOTDIR, path)
        if entry.entries:
            raise _error(errno.ENOTEMPTY, path)
        folder.put(name, None)

    def list(self, path: str) -> list[str]:
        """The names in a folder. Raises `OSError`."""
        folder = self.find(path)
        if not isinstance(folder, Folder):
            raise _error(errno.ENOTDIR, path)
        return list(folder.entries)

    def status(self, path: str) -> SimpleNamespace:
        """See lstat(2). Raises `OSError`."""
        return status_of(self.find(path))

    # -- bytes

    def write(self, file: File, data: bytes, offset: int) -> int:
        """Raises `OSError` where there is no room."""
        self._take_room(max(0, offset + len(data) - len(file.data)))
        file.write(data, offset)
        file.written_at = self._now()
        return len(data)

    def resize(self, file: File, size: int) -> None:
        """Raises `OSError` where there is no room."""
        self._take_room(max(0, size - len(file.data)))
        file.resize(size)

    def _take_room(self, num_bytes: int) -> None:
        if num_bytes and sum(len(file.data) for file in self.files) + num_bytes > self.capacity_bytes:
            raise _error(errno.ENOSPC)

    def lose_power(self, chance: random.Random) -> None:
        """All processes are dead: what is left is what is durable, and a part of the rest."""
        self.root.lose_power(chance)
        self.files = dict.fromkeys(_files_below(self.root))


def status_of(entry: File | Folder) -> SimpleNamespace:
    """See fstat(2)."""
    is_file = isinstance(entry, File)
    return SimpleNamespace(
        st_dev=1,
        st_ino=entry.inode,
        st_uid=os.geteuid(),
        st_mode=(stat.S_IFREG | 0o600) if is_file else (stat.S_IFDIR | 0o700),
        st_size=len(entry.data) if isinstance(entry, File) else 0,
        st_mtime=entry.written_at if isinstance(entry, File) else 0.0,
    )


def _set(entries: dict[str, File | Folder], names: Names) -> None:
    for name, entry in names:
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


def _names(path: str) -> list[str]:
    return [name for name in path.split("/") if name]


def _files_below(folder: Folder) -> Iterator[File]:
    for entry in folder.entries.values():
        if isinstance(entry, File):
            yield entry
        else:
            yield from _files_below(entry)
