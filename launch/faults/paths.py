"""Paths of the simulated disk, with the face of `pathlib.Path`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

from fastdeploy_cache.launch.faults.disk import File, SimulatedDisk
from fastdeploy_cache.launch.faults.file_calls import FileCalls


def paths_of(calls: FileCalls, disk: SimulatedDisk) -> type[SimulatedPath]:
    """What takes the place of `pathlib.Path`."""
    return cast("type[SimulatedPath]", type("Path", (SimulatedPath,), {"calls": calls, "disk": disk}))


class SimulatedPath(PurePosixPath):
    """See `pathlib.Path`; over the simulated disk."""

    calls: FileCalls
    disk: SimulatedDisk

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        self.calls.file_call(str(self))
        try:
            self.disk.make_folder(str(self))
        except FileNotFoundError:
            if not parents:
                raise
            type(self)(self.parent).mkdir(mode, parents=True, exist_ok=True)
            self.mkdir(mode, parents, exist_ok)
        except FileExistsError:
            if not exist_ok or not self.is_dir():
                raise

    def lstat(self) -> SimpleNamespace:
        self.calls.file_call(str(self))
        return self.disk.status(str(self))

    def stat(self, *, follow_symlinks: bool = True) -> SimpleNamespace:  # there are no links
        return self.lstat()

    def exists(self) -> bool:  # as of Python 3.14: False also where it cannot be known
        try:
            self.lstat()
        except OSError:
            return False
        return True

    def is_dir(self) -> bool:
        return self.exists() and not isinstance(self.disk.find(str(self)), File)

    def is_symlink(self) -> bool:
        return False

    def iterdir(self) -> Iterator[SimulatedPath]:
        self.calls.file_call(str(self))
        for name in self.disk.list(str(self)):
            yield self / name

    def glob(self, pattern: str) -> Iterator[SimulatedPath]:  # as of Python 3.13: nothing where it cannot be known
        with suppress(OSError):
            self.calls.file_call(str(self))
            yield from (self / name for name in self.disk.list(str(self)) if fnmatchcase(name, pattern))

    def replace(self, new: Any) -> SimulatedPath:
        self.calls.file_call(str(self))
        self.disk.rename(str(self), str(new))
        return type(self)(new)

    def unlink(self, missing_ok: bool = False) -> None:
        self.calls.file_call(str(self))
        try:
            self.disk.remove(str(self))
        except FileNotFoundError:
            if not missing_ok:
                raise

    def rmdir(self) -> None:
        self.calls.file_call(str(self))
        self.disk.remove_folder(str(self))

    def read_text(self, *_: Any, **__: Any) -> str:
        return self.calls.virtual(str(self))
