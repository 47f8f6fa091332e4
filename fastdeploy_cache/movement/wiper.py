"""Blocks that a forgotten namespace has had are overwritten before they are given to anybody else."""

from __future__ import annotations

import contextlib
import threading
from array import array
from functools import partial

from fastdeploy_cache.books.block_pool import TASK, BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Soiled
from fastdeploy_cache.books.mishaps import contained
from fastdeploy_cache.books.run import GPU, TIERS, Tier
from fastdeploy_cache.movement.block_mover import BlockMover, TaskEnded
from fastdeploy_cache.transfer_manager.task import TaskKind

_AGAIN_SECONDS = 1.0  # between two looks while the ranks cannot be asked
_IDLE_SECONDS, _STOP_SECONDS = 60.0, 5.0
_FREE_SHARE = 4  # such a part of what is free is wiped at a time


class Wiper:
    """Has the ranks wipe what was freed of a forgotten namespace. An id is free when every rank has answered.

    While ranks are down, or the cache is paused, the blocks wait: nobody gets them. The ranks are asked again when a
    task has ended, and after a while, by a thread that begins before anything is forgotten: later none may be had.
    Under the lock, but for `stop`.
    """

    def __init__(self, books: Books, mover: BlockMover) -> None:
        self._books, self._mover, self.mishaps = books, mover, books.mishaps
        self._is_noted = False
        self._num_wiping, self._not_before = 0, 0.0
        self._wake, self._ended = books.clock.event(), books.clock.event()
        self._thread: threading.Thread | None = None
        rows = books.rows.checkpoints.pools if books.rows is not None else ()
        self._places = [(books.pools[tier], tier, 0) for tier in TIERS]
        self._places += [(units.pool, GPU, row) for row, units in enumerate(rows, 1)]
        self._pools = [pool for pool, _, _ in self._places]
        assert len({*self._pools}) == len(self._pools), "two rows have one pool: a unit of it would be wiped in one"
        for pool in self._pools:
            pool.on_soiled = self._note
        books.listen(Soiled, self._begin)
        books.listen(TaskEnded, self._begin)

    @property
    def num_waiting(self) -> int:
        """Blocks and units that are not wiped yet, but for those that somebody still holds."""
        return self._num_wiping + sum([pool.num_soiled + pool.num_stale + pool.num_read_out for pool in self._pools])

    @property
    def num_held(self) -> int:
        """Blocks and units that are wiped as soon as who holds them lets them go."""
        return sum([pool.num_marked - pool.num_stale - pool.num_read_out for pool in self._pools])

    @contained("landing", None)
    def go_on(self) -> None:
        """Ask the ranks for what waits, if they can be asked; else, or where that fails, look again after a while."""
        try:
            is_early = self._books.clock.now() < self._not_before
            for pool, tier, row in () if is_early else self._places:
                if (pool.num_soiled or pool.has_stale) and self._mover.can(TaskKind.WIPE):
                    if not pool.num_soiled and not self._num_wiping:  # not all at once: requests need blocks meanwhile
                        pool.soil_stale(max(1, pool.num_free // _FREE_SHARE))
                    if pool.num_soiled:
                        self._wipe(pool, tier, row)
        finally:
            if self._is_behind and not self._num_wiping:
                self._wake.set()

    def start(self) -> None:
        """Begin to look, unless it has begun. Raises `RuntimeError`: there is no thread for it."""
        if self._thread is None:
            thread = threading.Thread(target=self._run, name="wiper", daemon=True)
            thread.start()
            self._thread = thread

    def stop(self) -> None:
        """Look no more. Safe to call twice, and from a callback."""
        self._ended.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():  # it may call callers
            self._thread.join(_STOP_SECONDS)

    @property
    def _is_behind(self) -> bool:
        return any(pool.num_soiled or pool.has_stale for pool in self._pools)

    def _run(self) -> None:
        """Nothing may have changed but that the ranks are back. Now and then it looks anyway: a look may fail."""
        while not self._ended.is_set():
            self._wake.wait(_IDLE_SECONDS)
            if not self._ended.wait(_AGAIN_SECONDS):
                self._wake.clear()
                self.mishaps.contain("landing", self._look_again)

    def _look_again(self) -> None:
        with self._books:
            if not self._books.is_closed:
                self.go_on()

    def _note(self) -> None:
        if not self._is_noted:
            with contextlib.suppress(MemoryError):  # the next task that ends looks, too
                self._books.note(Soiled())
                self._is_noted = True

    def _begin(self, _: object) -> None:
        self._is_noted = False
        if self._is_behind:
            self.go_on()

    def _wipe(self, pool: BlockPool, tier: Tier, row: int) -> None:
        ids = pool.take_soiled()
        try:
            self._mover.wipe(tier, ids, partial(self._end, pool, ids), row)
        except BaseException:
            pool.soil(ids)
            raise
        self._num_wiping += len(ids)

    def _end(self, pool: BlockPool, ids: array[int], succeeded: bool) -> None:
        """The ranks have answered: the ids are free, or wait once more. Needs no memory."""
        self._num_wiping -= len(ids)
        if succeeded:
            pool.free(ids, TASK)
        else:
            pool.soil(ids)
            self._not_before = self._books.clock.now() + _AGAIN_SECONDS  # not at once: it may fail at once
