"""How long a caller may wait: what is given as a time to any verb that waits."""

from __future__ import annotations

import numbers
from typing import Any

from fastdeploy_cache.errors import RequestError

LONGEST_SECONDS = 86400.0  # the clocks of threads and of the kernel end somewhere, and nobody waits for ever here


def seconds_to_wait(verb: str, seconds: Any, default: float | None = None) -> float:
    """What `verb` waits when `seconds` were given to it: nothing where they are negative, and at most a day.

    None stands for the default, where the verb has one.

    Raises:
        RequestError: they are no number.
    """
    if seconds is None and default is not None:
        return default
    given: Any = seconds
    if isinstance(seconds, numbers.Real) and not isinstance(seconds, bool):
        if given >= LONGEST_SECONDS:
            return LONGEST_SECONDS
        if given < LONGEST_SECONDS:  # not so with what is no number, "nan"
            return max(float(given), 0.0)
    raise RequestError(f"{verb}: the time to wait is {seconds!r}; give a number of seconds")
