"""A log whose failure is nobody's failure."""

from __future__ import annotations

import contextlib
import logging
from typing import Any


class EventLog(logging.LoggerAdapter[logging.Logger]):
    """A module's logger, for code that must not fail by it: under a lock, or on a thread that others depend on.

    The standard library keeps to itself what its handlers raise. A filter, or a handler that an application has
    written, does not: what it raises would surface in the middle of a change to the books. Any thread.
    """

    def log(self, level: int, msg: object, *args: Any, **kwargs: Any) -> None:
        """Log as `logging.Logger.log` does; what a filter or a handler raises costs this line and nothing else."""
        with contextlib.suppress(Exception):
            super().log(level, msg, *args, **{"stacklevel": 2, **kwargs})


def event_log(name: str) -> EventLog:
    """The log of the module `name`."""
    return EventLog(logging.getLogger(name))
