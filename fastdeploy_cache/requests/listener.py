"""Who hears of every verb of a request: the flight recorder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Protocol

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.request import Request
from fastdeploy_cache.requests.active_request import ActiveRequest

# The first of what is noted. Behind it: the request's number, then
ALLOCATED: Final = 3  # how many blocks it got, and whether they lie behind some that are still coming
REFUSED: Final = 4  # how many it did not get, and how many were missing, at most `MOST_NOTED`
COMMITTED: Final = 5  # how many tokens are computed, and how many blocks it has by then: some may be new
CONFIRMED: Final = 6  # whether what it ran ahead of has arrived
MOST_NOTED: Final = 2**32 - 1  # a count that a caller has given; a larger one is noted as this
SETTLED_LATE: Final = 15  # nothing: its caller has looked again, and its match is what was shown then
SNAPSHOT: Final = 19  # behind how many tokens, and whether there was a slot for it
DRAFTED: Final = 20  # nothing: the snapshot that it took last was of a draft, and other tokens were accepted
STATE_COPIED: Final = 22  # nothing: a copy of its state has begun, as its loads have ended


class RequestListener(Protocol):
    """Told under the lock, behind what it is told of. It raises nothing, and takes less than a microsecond."""

    @property
    def note(self) -> Callable[[tuple[object, ...]], None]:
        """What takes notes of each step: a call of our own would cost too much. Fetched first, and called then: in one
        go, as a method, CPython 3.11 would look for it in the class each time, at half of what a note costs."""
        ...

    def matched(self, active: ActiveRequest) -> None:
        """Its prefix was looked for."""
        ...

    def looked(self, request: Request, keys: BlockKeys, path: list[Run], num_found: int) -> None:
        """A request that is queued was looked for by `prefetch`: so much of it was found."""
        ...

    def begin_step(self) -> None:
        """What is noted from here on is of one step of several requests, in one turn."""
        ...

    def end_step(self) -> None:
        """The reverse."""
        ...

    def released(self, active: ActiveRequest) -> None:
        """It goes. Told before its use is noted."""
        ...
