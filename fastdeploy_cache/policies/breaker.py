"""A circuit breaker: whether something that fails is to be left alone for a while. Pure: the caller brings the time."""

from __future__ import annotations

from enum import IntEnum

_MAX_PAUSE_SECONDS = 60.0


class BreakerState(IntEnum):
    """The states of a breaker, numbered as the metric shows them."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Breaker:
    """Opens after so many failures in a row; after a pause one probe decides. One thread at a time.

    ::

        CLOSED --failures in a row--> OPEN --pause over, probe begun--> HALF_OPEN --success--> CLOSED
                                        ^------------failure (pause doubles)--------+
    """

    def __init__(self, max_failures: int, pause_seconds: float) -> None:
        self.state = BreakerState.CLOSED
        self._max_failures = max_failures
        self._first_pause_seconds = self._pause_seconds = pause_seconds
        self._num_failures = 0
        self._probe_at = 0.0

    @property
    def is_closed(self) -> bool:
        """Whether to use it."""
        return self.state is BreakerState.CLOSED

    def is_probe_due(self, now: float) -> bool:
        """Whether to probe it now; the caller does so and tells `succeeded` or `failed`."""
        return self.state is BreakerState.OPEN and now >= self._probe_at

    def begin_probe(self) -> None:
        """The probe is on its way; until it has ended there is no other."""
        self.state = BreakerState.HALF_OPEN

    def succeeded(self) -> None:
        """It works. Where it is not closed only a probe says so: this began before it opened."""
        if self.is_closed:
            self._num_failures = 0

    def failed(self, now: float) -> None:
        """It does not."""
        if not self.is_closed:
            return
        self._num_failures += 1
        if self._num_failures >= self._max_failures:
            self._open(now)

    def probe_ended(self, worked: bool | None, now: float) -> None:
        """A probe has ended; None: it was not tried."""
        if self.state is BreakerState.HALF_OPEN:
            if worked:
                self.state = BreakerState.CLOSED
                self._num_failures, self._pause_seconds = 0, self._first_pause_seconds
                return
            if worked is False:
                self._pause_seconds = min(2 * self._pause_seconds, max(_MAX_PAUSE_SECONDS, self._first_pause_seconds))
            self._open(now)
        elif worked:
            self.succeeded()
        elif worked is False:
            self.failed(now)

    def _open(self, now: float) -> None:
        self.state, self._probe_at = BreakerState.OPEN, now + self._pause_seconds
