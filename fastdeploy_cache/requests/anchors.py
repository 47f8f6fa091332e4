"""Where requests of a hybrid model go on: they begin at checkpoints, and make some. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.path import usable_end
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import CheckpointMaker, rows_of
from fastdeploy_cache.requests.room_queue import RoomNeed
from fastdeploy_cache.requests.row_matches import RowMatches
from fastdeploy_cache.requests.snapshots import Snapshots
from fastdeploy_cache.requests.tables import RequestRows, RowTable

_NONE = array("i")  # never changed


class Anchors:
    """The units of a request, from its match to its release, and the checkpoints that it keeps and makes.

    A checkpoint is made where requests return: at the last boundary of a prompt at which the same prompt could go on,
    where it parts from what is cached, at regular boundaries where the configuration asks for some, and at the last
    boundary of the whole request. Of a model with states only where the engine has taken a snapshot.
    """

    def __init__(
        self, config: CacheConfig, books: Books, rows: RowBooks, images: ImageMover, *, matches: RowMatches
    ) -> None:
        self._images, self.matches = images, matches
        self._books, self._tree, self._rows = books, books.tree, rows
        self._shapes, self._size = rows.checkpoints.sizes.rows, config.block_size
        self._is_shared = len({id(pool) for pool in rows.checkpoints.pools}) < len(rows.checkpoints.pools)
        self._maker = CheckpointMaker(books, rows, config.checkpoints_per_path)
        self.snapshots = Snapshots(config, books, rows, self._maker)
        self.state_rows = self.snapshots.state_rows

    def begin(self, active: ActiveRequest) -> None:
        """It has nothing of any row yet."""
        count = len(self._shapes)
        active.rows = RequestRows(
            [0] * count, [array("i") for _ in range(count)], [set() for _ in range(count)], [], []
        )

    # -- more units

    def check_room(self, active: ActiveRequest, num_blocks: int) -> None:
        """Raise `OutOfBlocksError` for the first row that lacks units for so many more blocks. Before that the request
        gives up the states of its output that it keeps for its release, and what their windows hold; and what lies in
        front of all that it reads, if it has run ahead up to here."""
        short = self._out_of_units(active, num_blocks)
        if short is not None and not active.is_ahead:
            if rows_of(active).newest is not None:
                self.snapshots.let_newest_pass(active)
            self._slide(active)
            short = self._out_of_units(active, num_blocks)
        if short is not None:
            raise short

    def _out_of_units(self, active: ActiveRequest, num_blocks: int) -> OutOfBlocksError | None:
        needed: dict[int, int] = {}
        for number, pool in enumerate(self._rows.checkpoints.pools):
            count = self._num_new(active, number, num_blocks)
            if self._is_shared:  # two rows have one pool
                count = needed[id(pool)] = needed.get(id(pool), 0) + count
            if count > pool.pool.num_free and count > pool.num_available:
                most = pool.pool.num_blocks
                is_more = count + len(rows_of(active).own[number]) > most
                missing, coming = count - pool.num_available, self._images.num_coming()[number]
                row = str(self._shapes[number])
                return OutOfBlocksError(missing, coming, num_all=most if is_more else None, row=row)
        return None

    def need(self, active: ActiveRequest, num_blocks: int) -> RoomNeed:
        """What so many more blocks of it take."""
        return RoomNeed(num_blocks, tuple([self._num_new(active, row, num_blocks) for row in range(len(self._shapes))]))

    def _num_new(self, active: ActiveRequest, row: int, num_blocks: int) -> int:
        """A state needs one slot, and has it from its first blocks on."""
        if row not in self.state_rows:
            return num_blocks
        return int(num_blocks > 0 and not rows_of(active).own[row])

    def extend(self, active: ActiveRequest, first_block: int, num_blocks: int) -> tuple[RowTable, ...]:
        """Units for blocks [first_block, first_block + num_blocks) of each row; there is room. All of them or, on
        `MemoryError`, none."""
        rows, taken = rows_of(active), [_NONE] * len(self._shapes)
        try:
            for number in range(len(taken)):
                taken[number] = self._rows.take(number, self._num_new(active, number, num_blocks), REQUEST)
            new = tuple([RowTable(first_block, units.tolist()) for units in taken])
            for number, units in enumerate(taken):
                if rows.is_forgotten and units:
                    self._rows.checkpoints.pools[number].pool.taint(units)
                if number not in self.state_rows:
                    rows.tables[number].extend(units)
                rows.own[number].update(units)
        except BaseException:
            self._undo(rows, taken)
            raise
        for number in self.state_rows:
            if taken[number]:  # in place of the slot of the checkpoint at which it began
                rows.tables[number], rows.firsts[number] = taken[number], first_block
        return new

    def take_back(self, active: ActiveRequest, new: tuple[RowTable, ...]) -> None:
        """The reverse of `extend`, for what it gave last."""
        self._undo(rows_of(active), [table.block_ids for table in new])

    def _undo(self, rows: RequestRows, taken: Sequence[Sequence[int]]) -> None:
        """Free these units, some of which may have joined their tables. Needs no memory."""
        for number, units in enumerate(taken):
            table = rows.tables[number]
            if units and table and table[-1] == units[-1]:
                if number in self.state_rows and rows.matched:
                    rows.tables[number], rows.firsts[number] = rows.matched[number], rows.matched_firsts[number]
                else:
                    del table[len(table) - len(units) :]
            rows.own[number].difference_update(units)
            self._rows.checkpoints.pools[number].pool.free_each(units, REQUEST)

    # -- commits

    def committed(self, active: ActiveRequest) -> bool:
        """So many of its blocks are in the tree by now: checkpoints that were due are made, and what lies in front of
        all that it reads is free. Whether it has made or given up a snapshot or units."""
        rows, num_blocks = rows_of(active), active.num_committed_blocks
        if active.is_ahead:  # what it reads may never come: it keeps all until that is decided
            return False
        before = rows.pending, rows.newest, rows.passed, rows.num_slid
        is_found = self._is_found(active)
        if self.state_rows:
            self.snapshots.committed(active, rows, is_found=is_found)
        elif is_found:
            for boundary in rows.wanted:
                if rows.num_checked < boundary <= num_blocks:
                    self._maker.publish(active, boundary, None)
        rows.num_checked = max(rows.num_checked, num_blocks)
        self._slide(active)
        return before != (rows.pending, rows.newest, rows.passed, rows.num_slid)

    def _is_found(self, active: ActiveRequest) -> bool:
        """Whether what it has committed is what its pin holds, and is found by others."""
        is_current = active.generation >= self._tree.generations.last_reset
        is_whole = active.pin is not None and active.num_pinned_blocks == active.num_committed_blocks
        return is_current and is_whole and not active.is_detached

    def _slide(self, active: ActiveRequest) -> None:
        """Free what lies in front of every position that is read any more, and let checkpoints go that lie there."""
        rows = rows_of(active)
        least = active.num_computed_tokens // self._size
        if rows.newest is not None and rows.newest.boundary < least:
            least = rows.newest.boundary
        if rows.passed is not None and active.num_computed_tokens > rows.passed.boundary * self._size:
            self.snapshots.end_passed(rows)
        if least == rows.num_slid:
            return
        reached = least
        for number, row in enumerate(self._shapes):
            first = row.first_block(least)
            reached = min(reached, first)
            gone = first - rows.firsts[number]
            if gone > 0 and number not in self.state_rows:
                self._free_units(rows, number, rows.tables[number][:gone])
                del rows.tables[number][:gone]
                rows.firsts[number] = first
        while rows.anchors and rows.anchors[0].boundary <= reached:  # they are in the order of their boundaries
            self._rows.checkpoints.unpin(rows.anchors.pop(0))
        rows.num_slid = least

    def _free_units(self, rows: RequestRows, number: int, units: array[int]) -> None:
        own = rows.own[number]
        gone = array("i", [unit for unit in units if unit in own])
        if gone:
            own.difference_update(gone)
            self._rows.checkpoints.pools[number].pool.free(gone, REQUEST)

    # -- the end

    def finish(self, active: ActiveRequest) -> None:
        """It is about to be released: its last checkpoint is made."""
        rows, boundary = rows_of(active), active.num_committed_blocks
        if not self._is_found(active):
            return
        if self.state_rows:
            self.snapshots.make_newest(active, rows)
        elif boundary := usable_end(active.request, boundary, self._size):
            self._maker.publish(active, boundary, None)

    def use(self, active: ActiveRequest, *, is_first: bool) -> None:
        """Its path was used just now: so were the checkpoint at which it began, and those that it has made. One use is
        counted of a request, however often it was preempted."""
        used = [each for each in rows_of(active).used if self._rows.checkpoints.is_here(each)]
        self._rows.use(used, is_first=is_first)

    def end(self, active: ActiveRequest) -> None:
        """It holds nothing of any row any more. Needs no memory."""
        rows = active.rows
        if rows is None:  # there was no memory to begin
            return
        for checkpoint in rows.anchors:
            self._rows.checkpoints.unpin(checkpoint)
        self.matches.copies.give_up(rows)
        for pool, own in zip(self._rows.checkpoints.pools, rows.own, strict=True):
            pool.pool.free_each(own, REQUEST)
            own.clear()
        rows.pending = rows.newest = rows.passed = rows.goal = None
        for table in rows.tables:
            del table[:]
        rows.anchors.clear()
        rows.used.clear()
