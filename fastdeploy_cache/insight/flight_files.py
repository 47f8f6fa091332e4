"""Folders of flight recordings: names, how many are kept, and one that is being written."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastdeploy_cache.errors import RecordingError, reason_of
from fastdeploy_cache.insight.flight_file import open_private

SUFFIX = ".flight"


class FlightFolder:
    """Files of one kind in a folder: only so many, the newest. One thread at a time."""

    def __init__(self, folder: Path, kind: str, num_kept: int) -> None:
        """`kind`: what names begin with. Others' files in the folder are left alone."""
        self._folder, self._kind, self._num_kept = folder, kind, num_kept
        self._num_made = 0

    def next_path(self) -> Path:
        """A name for a new file; the oldest files go, so that there is one to come. Makes the folder, of mode 0700.

        Raises:
            RecordingError: the folder cannot be made or read.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = list(self._folder.glob(f"{self._kind}-*{SUFFIX}"))
        except OSError as error:
            reason = f"no flight recording can be begun in {self._folder}: {reason_of(error)}"
            raise RecordingError(f"{reason}; it goes on once that is mended") from error
        files = sorted(found, key=lambda path: (_changed_at(path), path.name))
        for old in files[: max(0, len(files) - self._num_kept + 1)]:
            with contextlib.suppress(OSError):  # somebody else's, or gone
                old.unlink()
        self._num_made += 1
        when = time.strftime("%Y%m%dT%H%M%S", time.gmtime())
        return self._folder / f"{self._kind}-{when}-{os.getpid()}-{self._num_made:06}{SUFFIX}"


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
        path = self._folder.next_path()
        try:
            self._file = open_private(path)
        except OSError as error:
            raise RecordingError(f"no flight recording can be begun: {reason_of(error)}") from error
        self._num_bytes = 0
        try:
            self.write(self._header())
        except RecordingError:
            with contextlib.suppress(OSError):  # a file without a begin is of no use to anybody
                path.unlink()
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


def _changed_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
