"""What a tenant has not used for its time to live leaves both tiers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.tenants.policies import last_use
from fastdeploy_cache.ipc.clock import Alarm
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)

_A_TURN: Final = 256  # runs that are looked at in one turn: some hundred microseconds
_LEAST_SECONDS, _PARTS = 0.1, 8  # between two looks: such a part of the shortest time to live, or that
_Look = tuple[Run, bool]  # and whether what is below it has been looked at


class Expiry:
    """Looks through the runs of tenants that keep things for a time, on a thread of the clock's.

    Nothing goes before its time, and everything has gone an eighth of it later, or 0.1 s, whichever is more; but for
    what is held, which goes with a look after that. All of a run's blocks have the last use of the run, and what is
    beneath a run was not used later than it.
    """

    def __init__(self, books: Books, keep_seconds: Mapping[str, float]) -> None:
        """`keep_seconds`: by namespace."""
        self._books, self._keep_seconds = books, keep_seconds
        self._alarm: Alarm | None = None

    def start(self) -> None:
        """Look from now on, again and again. Raises `RuntimeError` where no thread can be started."""
        if self._keep_seconds:
            self._arm()

    def stop(self) -> None:
        """Look no more; a look that goes on ends with its turn."""
        if self._alarm is not None:
            self._alarm.cancel()

    def _arm(self) -> None:
        clock = self._books.clock
        seconds = max(_LEAST_SECONDS, min(self._keep_seconds.values()) / _PARTS)
        self._alarm = clock.call_at(clock.now() + seconds, self._look_through)

    # -- a thread of the clock's

    def _look_through(self) -> None:
        """One look at all of them, in turns; then another one is due, whatever becomes of this one."""
        self._books.mishaps.contain("policy", self._look)
        while not self._books.is_closed:
            try:
                self._arm()
                return
            except RuntimeError:  # no thread now: this one is still here
                self._books.clock.sleep(_LEAST_SECONDS)

    def _look(self) -> None:
        for namespace, seconds in self._keep_seconds.items():
            looks: list[_Look] | None = None
            while looks is None or looks:
                with self._books:
                    if self._books.is_closed:
                        return
                    if looks is None:
                        root = self._books.tree.roots.get(namespace)
                        looks = _below(root) if root is not None else []
                    self._look_at_some(looks, seconds)

    def _look_at_some(self, looks: list[_Look], seconds: float) -> None:
        """What is below a run goes before it, so that no turn removes more than it looks at."""
        tree, before = self._books.tree, self._books.clock.now() - seconds
        for _ in range(min(_A_TURN, len(looks))):
            run, is_second = looks.pop()
            if run.parent is None or run.epoch != tree.epoch:
                continue  # it has gone meanwhile
            if run.children:
                if not is_second:
                    looks.append((run, True))
                    looks += _below(run)
            elif not run.num_held and last_use(run) <= before:
                tree.residency.truncate(run, 0, Loss.EXPIRED)


def _below(run: Run) -> list[_Look]:
    return [(child, False) for child in run.children.values()]
