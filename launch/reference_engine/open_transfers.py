"""Which sends and receives are under way: while they are, they hold blocks that come home by themselves."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fastdeploy_cache.peer_transfer import PeerTransfer


class OpenTransfers:
    """Lets an engine that is short of blocks wait for the end of one. Any thread, but for `look`: one thread."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called at each one's end, by the cache's thread."""
        self._on_end = on_end
        self._changed = threading.Condition()
        self._num_open = 0
        self._has_ended = False  # since the last look

    def add(self, transfer: PeerTransfer) -> None:
        """It has begun."""
        with self._changed:
            self._num_open += 1
        transfer.on_done(self._end)

    def look(self) -> None:
        """From here on an end counts for `may_give_blocks`."""
        with self._changed:
            self._has_ended = False

    def may_give_blocks(self) -> bool:
        """Whether one is open, or was since the last look.

        Without the latter: an allocation fails, then the transfer ends that held the blocks, and who asks now gives the
        request up though there is room.
        """
        with self._changed:
            return self._num_open > 0 or self._has_ended

    def wait_end(self, timeout_seconds: float) -> None:
        """Until one has ended since the last look, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended, timeout_seconds)

    def _end(self) -> None:
        with self._changed:
            self._num_open -= 1
            self._has_ended = True
            self._changed.notify_all()
        self._on_end()
