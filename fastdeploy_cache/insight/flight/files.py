"""Folders of flight recordings: names, how many are kept, and one that is being written."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import RecordingError, reason_of
from fastdeploy_cache.insight.flight.file import open_private
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

SUFFIX = ".flight"


class FlightFolder:
    """Files of one kind in a folder: only so many, the newest. Any thread."""

    def __init__(self, folder: Path, kind: str, num_kept: int) -> None:
        """`kind`: what names begin with. Others' files in the folder are left alone."""
        self._folder, self._kind, self._num_kept = folder, kind, num_kept
        self._run = SYSTEM_CLOCK.random_bytes(4).hex()  # another cache may write to it, too
        self._numbers = itertools.count(1)

    @functools.cached_property
    def _real(self) -> Path:
        """Where the folder was when it was first written to: a link that comes in its place later is not followed."""
        return Path(os.path.realpath(self._folder))

    @contextlib.contextmanager
    def next_path(self) -> Iterator[tuple[Path, int]]:
        """A path that no other file has had, and its folder, open, to make the file by; the oldest files go, so that
        there is one to come. Makes the folder, of mode 0700.

        Raises:
            RecordingError: the folder cannot be made or read, or a link is in its place.
        """
        with contextlib.ExitStack() as stack:
            try:
                self._real.mkdir(mode=0o700, parents=True, exist_ok=True)
                folder = os.open(self._real, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
                stack.callback(os.close, folder)
                self._make_room(folder)
            except OSError as error:
                reason = f"no flight recording can be begun in {self._folder}: {reason_of(error)}"
                raise RecordingError(f"{reason}; it goes on once that is mended") from error
            when = datetime.fromtimestamp(SYSTEM_CLOCK.unix(), UTC).strftime("%Y%m%dT%H%M%S")
            name = f"{self._kind}-{when}-{os.getpid()}-{self._run}-{next(self._numbers):06}{SUFFIX}"
            yield self._folder / name, folder

    def _make_room(self, folder: int) -> None:
        found = (name for name in os.listdir(folder) if name.startswith(f"{self._kind}-") and name.endswith(SUFFIX))
        files = sorted(found, key=lambda name: (_changed_at(name, folder), name))
        for old in files[: max(0, len(files) - self._num_kept + 1)]:
            with contextlib.suppress(OSError):  # somebody else's, or gone
                os.unlink(old, dir_fd=folder)


class GrowingFile:
    """A recording that is written as it happens, file after file. One thread at a time."""

    def __init__(self, folder: FlightFolder, max_bytes: int, header: Callable[[], bytes]) -> None:
        self._folder, self._max_bytes, self._header = folder, max_bytes, header
        self._file: Any = None
        self._num_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether the next piece that may begin a file should."""
        return self._file is None or self._num_bytes >= self._max_bytes

    @property
    def is_open(self) -> bool:
        """Whether there is a file to write on."""
        return self._file is not None

    def begin(self) -> None:
        """Go on in a new file.

        Raises:
            RecordingError: it cannot be made.
        """
        self.close()
        with self._folder.next_path() as (path, folder):
            try:
                self._file = open_private(path.name, folder)
            except OSError as error:
                raise RecordingError(f"no flight recording can be begun: {reason_of(error)}") from error
            self._num_bytes = 0
            try:
                self.write(self._header())
            except RecordingError:
                with contextlib.suppress(OSError):  # a file without a begin is of no use to anybody
                    os.unlink(path.name, dir_fd=folder)
                raise

    def write(self, data: bytes) -> None:
        """Add these bytes, whole.

        Raises:
            RecordingError: they cannot be written; the file ends here.
        """
        try:
            self._file.write(data)
            self._file.flush()
        except OSError as error:
            self.close()
            raise RecordingError(f"a flight recording cannot be written on: {reason_of(error)}") from error
        self._num_bytes += len(data)

    def close(self) -> None:
        """End the file, if one is open."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # what could not be written was told already
                file.close()


def _changed_at(name: str, folder: int) -> float:
    try:
        return os.stat(name, dir_fd=folder).st_mtime
    except OSError:
        return 0.0
