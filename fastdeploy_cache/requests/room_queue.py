"""Who waits for GPU blocks that copies in flight will give back, served in the order in which they came."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Generic, NamedTuple, TypeVar

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Change, Forgotten, GpuForgotten, RoomCame, TierLost
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.errors import CacheError, OutOfBlocksError
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.movement.block_mover import BlockMover, TaskEnded
from fastdeploy_cache.movement.images import ImageMover

T = TypeVar("T")
_MATCH_SECONDS = 5.0  # at most, that a match waits: copies take milliseconds, and who is behind it waits, too


class RoomNeed(NamedTuple):
    """GPU blocks that somebody needs, and units of each further row."""

    num_blocks: int
    units: tuple[int, ...] = ()
    tenant: int | None = None  # whose need it is


class RoomWait:
    """One who waits. It holds no room meanwhile, at most pins.

    Attributes:
        need: what it waits for.
        is_match: whether a match waits, to load; else an allocation.
        began_at, deadline: by the monotonic clock.
        done: set when it waits no more: it has its blocks, or has given up.
        on_done: called then, outside the lock.
    """

    __slots__ = ("began_at", "deadline", "done", "give_up", "is_match", "need", "on_done", "serve")

    def __init__(
        self,
        clock: Clock,
        need: RoomNeed,
        seconds: float,
        serve: Callable[[], bool],
        give_up: Callable[[], None] = lambda: None,
        *,
        is_match: bool = False,
    ) -> None:
        """`serve` takes the blocks, if they are there: False while they are not. `seconds`: that it waits at most."""
        self.need, self.is_match, self.began_at = need, is_match, clock.now()
        self.deadline = self.began_at + (min(seconds, _MATCH_SECONDS) if is_match else seconds)
        self.serve, self.give_up = serve, give_up
        self.done = clock.event()
        self.on_done: list[Callable[[], None]] = []

    def detail(self, clock: Clock) -> str:
        """For what, and how long, it has waited till now."""
        seconds, units = clock.now() - self.began_at, [num for num in self.need.units if num]
        what = f"{self.need.num_blocks} blocks" + (f" and {sum(units)} units of rows" if units else "")
        return f"it waited {seconds:.3f} s for {what}, which copies in flight were to give back"


class Taking(Generic[T]):
    """Blocks that somebody wants, asked for until they can be had. Under the lock, but for `result`."""

    def __init__(self, need: Callable[[], RoomNeed], take: Callable[[], T], undo: Callable[[T], None]) -> None:
        """`need`: what it would take now. `take` raises `OutOfBlocksError` while that cannot be had; `undo` is its
        reverse."""
        self.need, self._take, self._undo = need, take, undo
        self._taken: list[T] = []
        self._refused: CacheError | None = None

    def serve(self, has_room: Callable[[RoomNeed], bool]) -> bool:
        """Whether nothing is to be waited for any more: it has them, or never will."""
        if self._refused is not None and not has_room(self.need()):
            return False  # a refusal is told once
        try:
            self._taken.append(self._take())
        except OutOfBlocksError as refused:
            self._refused = refused
            return False
        except CacheError as error:  # it was released meanwhile, or the cache closed
            self._refused = error
        return True

    def give_back(self) -> None:
        """Undo what was taken."""
        if self._taken:
            self._undo(self._taken.pop())

    def result(self) -> T:
        """What was taken. Raises what `take` raised last."""
        if self._taken:
            return self._taken[0]
        assert self._refused is not None
        raise self._refused


class RoomQueue:
    """Under the lock, but for `when_room`.

    Somebody waits only while copies in flight will give back what it needs, by what is known then. Each of them ends by
    its own deadline, and what waits holds no blocks that a copy needs. So no wait lasts for ever, and none of two waits
    for the other. Whoever does not wait takes what can be had, also before those that do: a step that decodes is worth
    more than one that has yet to begin.

    Attributes:
        num_waited, seconds_waited: of all waits that have ended.
    """

    def __init__(
        self, books: Books, mover: BlockMover, num_coming: Callable[[], int], images: ImageMover | None
    ) -> None:
        """`num_coming`: blocks that can be had when all copies in flight have ended well. `images`: of a hybrid
        model."""
        self._books, self._mover, self._num_coming, self._images = books, mover, num_coming, images
        self._rows = books.rows.checkpoints if books.rows is not None else None
        self._waiting: dict[RoomWait, None] = {}
        self.num_waited, self.seconds_waited = 0, 0.0
        books.listen(RoomCame, self._look)
        for change in (TaskEnded, Forgotten, GpuForgotten, TierLost):
            books.listen(change, self._look_soon)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def num_matches(self) -> int:
        """How many matches are among those that wait."""
        return sum([wait.is_match for wait in self._waiting])

    def is_behind(self, wait: RoomWait | None) -> bool:
        """Whether others came before this one, or before somebody who does not wait yet."""
        return bool(self._waiting) and next(iter(self._waiting)) is not wait

    def has_room(self, need: RoomNeed) -> bool:
        """Whether it can be had now."""
        has_units = self._rows is None or self._rows.lacking(need.units) is None
        return has_units and need.num_blocks <= self._books.residency.num_available(GPU, need.tenant)

    def may_come(self, need: RoomNeed) -> bool:
        """Whether it can be had as soon as copies in flight have ended."""
        mover = self._mover
        if mover.is_quiet or all(transfer.done.is_set() for transfer in mover.in_flight.values()):
            return False
        if self._books.residency.num_available(GPU, need.tenant) + self._num_coming() < need.num_blocks:
            return False
        rows, images = self._rows, self._images
        return rows is None or images is None or rows.lacking(need.units, images.num_coming()) is None

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
        self.seconds_waited += self._books.clock.now() - wait.began_at
        wait.done.set()
        calls, wait.on_done = wait.on_done, []
        for call in calls:
            self._books.call_later(call)

    def _look_soon(self, _: Change) -> None:
        """When all others have heard of this change: what is recorded of it comes before what it makes possible."""
        if self._waiting:
            self._books.note(RoomCame(tier=GPU))

    def _look(self, came: RoomCame) -> None:
        """Serve from the front, as far as there is room. Who can hope for none any more gives up."""
        if came.tier is not GPU:
            return
        while self._waiting:
            first = next(iter(self._waiting))
            is_over = self._books.clock.now() >= first.deadline  # even so it takes what has come just now
            try:
                if not first.serve():
                    if not is_over and self.may_come(first.need):
                        return
                    first.give_up()
            except BaseException:  # who is behind it is not to wait for what fails again and again
                first.give_up()
                self.leave(first)
                raise
            self.leave(first)

    def when_room(self, taking: Taking[T], seconds: float, ready: Callable[[], None]) -> T:
        """What `taking` gets, now or whenever there is room. Not under the lock.

        `ready` is called before the wait begins: what the caller waits for itself would be in its own way.

        Raises `OutOfBlocksError` where waiting does not help, or the time is over, and what else `taking` meets.
        """
        serve = partial(taking.serve, self.has_room)
        with self._books:
            wait = RoomWait(self._books.clock, taking.need(), seconds, serve)
            if not serve() and self.may_come(wait.need):
                ready()
                if not serve():
                    wait.need = taking.need()  # by now its match is settled
                    self.enter(wait)
        try:
            if wait in self._waiting:
                wait.done.wait(seconds)
        except BaseException:  # Ctrl-C: nobody would hear of blocks that it gets from now on, or has got just now
            with self._books:
                self.leave(wait)
                taking.give_back()
            raise
        with self._books:
            if wait in self._waiting:  # its time is over: from now on it does not wait, and takes what can be had
                serve()
            self.leave(wait)
        return taking.result()
