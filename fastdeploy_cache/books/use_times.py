"""When the uses of a cache were, as far as it is worth the memory."""

from __future__ import annotations

from bisect import bisect_right

_EVERY_SECONDS = 0.25  # uses that come sooner after a note have its time
_MAX_NOTES = 512
_MAX_ERROR = 1 / 24  # of an age: then a month of uses takes about 400 notes


class UseTimes:
    """Runs know the order of their uses (`Usage.last_used`), and no time. A note of the time at some of these uses, no
    more than one in a quarter of a second, gives the age of any: the older it is, the less exactly, by a
    few hundredths. Under the lock.

    Attributes:
        next_at: the monotonic time from which on a use is noted again.
    """

    __slots__ = ("_orders", "_times", "next_at")

    def __init__(self) -> None:
        self._orders: list[int] = []
        self._times: list[float] = []
        self.next_at = 0.0

    def note(self, order: int, now: float) -> None:
        """The use of that order is happening."""
        self.next_at = now + _EVERY_SECONDS
        if self._orders and order <= self._orders[-1]:  # a policy of somebody else's making counts otherwise, or not
            return
        self._orders.append(order)
        self._times.append(now)
        if len(self._orders) > _MAX_NOTES:
            self._thin_out(now)

    def _thin_out(self, now: float) -> None:
        """Forget the notes whose uses have nearly the same age as those of the note before."""
        times, places = self._times, [len(self._times) - 1]
        for place in range(len(times) - 2, 0, -1):
            before = times[place - 1]
            if times[places[-1]] - before > (now - before) * _MAX_ERROR:
                places.append(place)
        places = [0, *reversed(places)]
        self._orders, self._times = [self._orders[i] for i in places], [times[i] for i in places]

    def seconds_since(self, order: int, now: float) -> float | None:
        """How long ago the use of that order was; None where there was none, or nothing is known of it."""
        place = bisect_right(self._orders, order) - 1
        return max(0.0, now - self._times[place]) if order > 0 and place >= 0 else None
