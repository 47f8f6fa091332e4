"""Which sends and receives are under way: while they are, they hold blocks that come home by themselves."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from fastdeploy_cache.launch.reference_engine.generation import Generation

_RETRY_SECONDS = 1.0  # processes that are down tell nobody when they are back


class OpenTransfers:
    """Lets an engine that is short of blocks wait for the end of one. Any thread, but for `look`: one thread."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called at each one's end, by the cache's thread."""
        self._on_end = on_end
        self._changed = threading.Condition()
        self._num_open = self._num_ended = 0
        self._num_seen = 0  # ended at the last look

    def add(self, on_done: Callable[[Callable[[], None]], None]) -> None:
        """One has begun, whose end `on_done` tells."""
        with self._changed:
            self._num_open += 1
        on_done(self._end)

    def look(self) -> None:
        """Note which have ended: an end after this counts for `may_give_blocks`, and ends a `Hold` that begins."""
        with self._changed:
            self._num_seen = self._num_ended

    @property
    def num_seen(self) -> int:
        """So many had ended at the last look."""
        return self._num_seen

    def has_ended_since(self, num_seen: int) -> bool:
        """Whether one has ended since so many had."""
        with self._changed:
            return self._num_ended > num_seen

    def may_give_blocks(self) -> bool:
        """Whether one is open, or was since the last look.

        Without the latter: an allocation fails, then the transfer ends that held the blocks, and who asks now gives the
        request up though there is room.
        """
        with self._changed:
            return self._num_open > 0 or self._num_ended > self._num_seen

    def wait_end(self, timeout_seconds: float) -> None:
        """Wait until one has ended since the last look, or the time is over."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_ended > self._num_seen, timeout_seconds)

    def _end(self) -> None:
        with self._changed:
            self._num_open -= 1
            self._num_ended += 1
            self._changed.notify_all()
        self._on_end()


class Hold:
    """Nothing can be sent, or received, now: who wants to waits until a transfer has ended, or some time has passed.
    The engine thread's."""

    def __init__(self, transfers: OpenTransfers, timeout_seconds: float) -> None:
        """Nobody is held longer than that after it was queued."""
        self._transfers, self._timeout_seconds = transfers, timeout_seconds
        self._until, self._num_seen = 0.0, 0

    def begin(self, generation: Generation) -> bool:
        """It was told "not now"; False where it has waited long enough.

        An end between the answer and this call counts: it is later than the engine's last look.
        """
        now = time.monotonic()
        if now >= generation.queued + self._timeout_seconds:
            return False
        self._until, self._num_seen = now + _RETRY_SECONDS, self._transfers.num_seen
        return True

    @property
    def seconds_left(self) -> float:
        """0.0 where it is over."""
        left = max(0.0, self._until - time.monotonic())
        return 0.0 if left and self._transfers.has_ended_since(self._num_seen) else left
