"""Who waits for GPU blocks that copies in flight will give back, served in the order in which they came."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Change, RoomCame
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.errors import CacheError, OutOfBlocksError
from fastdeploy_cache.movement.block_mover import BlockMover, TaskEnded

T = TypeVar("T")


class RoomWait:
    """One who waits. It holds no room meanwhile, at most pins.

    Attributes:
        num_blocks: that it needs.
        began_at, deadline: by the monotonic clock.
        done: set when it waits no more: it has its blocks, or has given up.
        on_done: called then, outside the lock.
    """

    __slots__ = ("began_at", "deadline", "done", "give_up", "num_blocks", "on_done", "serve")

    def __init__(
        self, num_blocks: int, deadline: float, serve: Callable[[], bool], give_up: Callable[[], None]
    ) -> None:
        """`serve` takes the blocks, if they are there: False while they are not."""
        self.num_blocks, self.began_at, self.deadline = num_blocks, time.monotonic(), deadline
        self.serve, self.give_up = serve, give_up
        self.done = threading.Event()
        self.on_done: list[Callable[[], None]] = []


class RoomQueue:
    """Under the lock, but for `when_room`.

    Somebody waits only while copies in flight will give back what it needs, by what is known then. Each of them ends by
    its own deadline, and what waits holds no blocks that a copy needs. So no wait lasts for ever, and none of two waits
    for the other. Whoever does not wait takes what can be had, also before those that do: a step that decodes is worth
    more than one that has yet to begin.

    Attributes:
        num_waited, seconds_waited: of all waits that have ended.
    """

    def __init__(self, books: Books, mover: BlockMover, num_coming: Callable[[], int]) -> None:
        """`num_coming`: blocks that can be had when all copies in flight have ended well."""
        self._books, self._mover, self._num_coming = books, mover, num_coming
        self._waiting: dict[RoomWait, None] = {}
        self.num_waited, self.seconds_waited = 0, 0.0
        books.listen(RoomCame, self._look)
        books.listen(TaskEnded, self._look)

    def __len__(self) -> int:
        return len(self._waiting)

    def is_behind(self, wait: RoomWait | None) -> bool:
        """Whether others came before this one, or before somebody who does not wait yet."""
        return bool(self._waiting) and next(iter(self._waiting)) is not wait

    def may_come(self, num_blocks: int) -> bool:
        """Whether so many blocks can be had as soon as copies in flight have ended."""
        mover = self._mover
        if mover.is_quiet or all(transfer.done.is_set() for transfer in mover.in_flight.values()):
            return False
        return self._books.residency.num_available(GPU) + self._num_coming() >= num_blocks

    def enter(self, wait: RoomWait) -> None:
        """It waits from now on, behind all others."""
        self._waiting[wait] = None
        self._books.await_room(self, True, GPU)

    def leave(self, wait: RoomWait) -> None:
        """It waits no more, for whatever reason. Leaving twice does nothing."""
        if wait.done.is_set():
            return
        self._waiting.pop(wait, None)
        self._books.await_room(self, bool(self._waiting), GPU)
        self.num_waited += 1
        self.seconds_waited += time.monotonic() - wait.began_at
        wait.done.set()
        calls, wait.on_done = wait.on_done, []
        for call in calls:
            self._books.call_later(call)

    def _look(self, change: Change) -> None:
        """Serve from the front, as far as there is room. Who can hope for none any more gives up."""
        if isinstance(change, RoomCame) and change.tier is not GPU:
            return
        while self._waiting:
            first = next(iter(self._waiting))
            if not first.serve():
                if time.monotonic() < first.deadline and self.may_come(first.num_blocks):
                    return
                first.give_up()
            self.leave(first)

    def when_room(self, num_blocks: int, take: Callable[[], T], seconds: float) -> T:
        """What `take` returns, which is called under the lock, now and whenever it may succeed.

        Raises what `take` raises; `OutOfBlocksError` where waiting does not help, or the time is over.
        """
        taken: list[T] = []
        failed: list[CacheError] = []

        def serve() -> bool:
            try:
                taken.append(take())
            except OutOfBlocksError as refused:
                failed[:] = [refused]
                return False
            except CacheError as error:  # it was released meanwhile, or the cache closed
                failed[:] = [error]
            return True

        with self._books:
            wait = RoomWait(num_blocks, time.monotonic() + seconds, serve, lambda: None)
            if not serve() and self.may_come(num_blocks):
                self.enter(wait)
        if wait in self._waiting:
            wait.done.wait(seconds)
            with self._books:
                self.leave(wait)
        if taken:
            return taken[0]
        raise failed[0]
