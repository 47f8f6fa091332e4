"""Threads that share work."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

Job = Callable[[], None]


def _tell_nobody(_: int) -> None:
    pass


class Crew:
    """Threads that do jobs together with the one that calls: whoever is free takes the next. One call at a time.

    So a thread that wakes up late, or has no core for a while, holds nobody up. They begin with the first call, and
    sleep in between.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        """`num_threads` with the one that calls."""
        self._num_others = num_threads - 1
        self._others = ThreadPoolExecutor(max(1, self._num_others), name)

    def run(self, jobs: Sequence[Job], on_done: Callable[[int], None] = _tell_nobody) -> None:
        """Do all jobs, begun in this order; raises what one raised, and then no other is running.

        `on_done` is called with rising counts when so many jobs from the first on have ended, last with all.
        """
        shared, num_told = _Shared(jobs), 0

        def tell() -> None:
            nonlocal num_told
            if (num_done := shared.count_done()) > num_told:
                num_told = num_done
                on_done(num_done)

        others = [self._others.submit(shared.work) for _ in range(min(self._num_others, len(jobs) - 1))]
        try:
            shared.work(tell)
        finally:
            shared.give_up()  # nothing is left, unless this thread's job or `on_done` has raised
            begun = [other for other in others if not other.cancel()]  # on a busy machine some come when all is done
            wait(begun)
        for other in begun:
            other.result()
        tell()

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._others.shutdown()


class _Shared:
    """Jobs that threads take one after the other: each step of an iterator is one thread's."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._left = iter(enumerate(jobs))
        self._has_ended = [False] * len(jobs) + [False]
        self._num_done = 0

    def work(self, after_each: Callable[[], None] | None = None) -> None:
        """Take jobs until none is left."""
        for number, job in self._left:
            job()
            self._has_ended[number] = True
            if after_each is not None:
                after_each()

    def give_up(self) -> None:
        """Leave none."""
        for _ in self._left:
            pass

    def count_done(self) -> int:
        """How many have ended, counted from the first up to one that has not. One thread asks."""
        self._num_done = self._has_ended.index(False, self._num_done)
        return self._num_done
