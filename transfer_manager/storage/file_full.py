"""What the file store says of a disk without room: a line in the log, ever more rarely, and a figure in its counts."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

logger = logging.getLogger(__name__)

NO_ROOM = {errno.ENOSPC, errno.EDQUOT}
Step = Literal["grow", "write", "commit"]


class FullDisk:
    """Which steps of a store have found no room on its disk when they were last tried. Any thread."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._refused: set[Step] = set()
        self._num_refusals = 0

    @property
    def is_full(self) -> bool:
        """Whether a step has found no room, and has not worked since."""
        return bool(self._refused)

    @contextmanager
    def watching(self, step: Step) -> Iterator[None]:
        """Do a step that takes room on the disk. What it raises goes on."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                self._note(step, error)
            raise
        with self._lock:
            self._refused.discard(step)

    def _note(self, step: Step, error: OSError) -> None:
        """Log the first refusal, the second, the fourth, the eighth and so on."""
        with self._lock:
            self._refused.add(step)
            self._num_refusals += 1
            num_refusals = self._num_refusals
        if num_refusals & (num_refusals - 1) == 0:
            text = "event=disk_full folder=%s step=%s num_refusals=%d error=%r"
            logger.warning(text, self._folder, step, num_refusals, error)
