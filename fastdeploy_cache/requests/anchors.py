"""Where requests of a hybrid model go on: they begin at checkpoints, and make some. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.path import gpu_ids
from fastdeploy_cache.books.row_books import RowBooks, usable_checkpoints
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.tables import RequestRows, RowTable, Snapshot

_NONE = array("i")  # never changed


class Anchors:
    """The units of a request, from its match to its release, and the checkpoints that it keeps and makes.

    A checkpoint is made where requests return: at the last boundary of a prompt at which the same prompt could go on,
    where it parts from what is cached, at regular boundaries where the configuration asks for some, and at the last
    boundary of the whole request. Of a model with states only where the engine has taken a snapshot.
    """

    def __init__(self, config: CacheConfig, books: Books, rows: RowBooks) -> None:
        self._books, self._tree, self._rows = books, books.tree, rows
        self._shapes, self._size = rows.checkpoints.sizes.rows, config.block_size
        self._most_inner = config.checkpoints_per_path
        self._every = config.checkpoint_every_tokens // config.block_size
        self._is_shared = len({id(pool) for pool in rows.checkpoints.pools}) < len(rows.checkpoints.pools)
        self.state_rows = tuple(number for number, row in enumerate(self._shapes) if row.kind == "state")

    # -- the match

    def begin(self, active: ActiveRequest) -> None:
        """It has nothing of any row yet."""
        count = len(self._shapes)
        active.rows = RequestRows([0] * count, [array("i") for _ in range(count)], [set() for _ in range(count)], [])

    def match(self, active: ActiveRequest, path: list[Run], num_found: int) -> array[int]:
        """Let it go on at the deepest checkpoint that is on the GPU, of a path on which so many blocks were found, and
        keep that. Returns the ids of the full blocks in front of it."""
        _, on_gpu = usable_checkpoints(path, num_found, active.request, self._size)
        boundary = on_gpu.boundary if on_gpu is not None else 0
        last = (active.request.num_tokens - 1) // self._size
        rows, wanted = self._of(active), {num_found, last}
        if self._every:
            wanted.update(range(self._every, last, self._every))
        rows.wanted = tuple(sorted([each for each in wanted if boundary < each <= last]))
        rows.num_checked = active.num_gpu_blocks = active.trail.num_whole_blocks = boundary
        if on_gpu is None:
            return array("i")
        active.trail.idle_since = path[-1].used_last
        ids, tables = gpu_ids(path, boundary), self._rows.checkpoints.unit_ids(on_gpu)  # may need memory
        active.pin = self._tree.move_pin(None, *self._tree.place(path, boundary))
        active.num_pinned_blocks = boundary
        self._keep(rows, on_gpu)
        rows.tables, rows.firsts = tables, [row.first_block(boundary) for row in self._shapes]
        rows.used = (on_gpu,)
        return ids

    def tables(self, active: ActiveRequest) -> tuple[RowTable, ...]:
        """What the match shows of each row."""
        rows = self._of(active)
        return tuple(RowTable(first, table.tolist()) for first, table in zip(rows.firsts, rows.tables, strict=True))

    @staticmethod
    def _of(active: ActiveRequest) -> RequestRows:
        assert active.rows is not None
        return active.rows

    def _keep(self, rows: RequestRows, checkpoint: Checkpoint) -> None:
        rows.anchors.append(checkpoint)  # first: it may need memory
        self._rows.checkpoints.pin(checkpoint)

    # -- more units

    def check_room(self, active: ActiveRequest, num_blocks: int) -> None:
        """Raise `OutOfBlocksError` for the first row that lacks units for so many more blocks."""
        needed: dict[int, int] = {}
        for number, pool in enumerate(self._rows.checkpoints.pools):
            count = self._num_new(active, number, num_blocks)
            if self._is_shared:  # two rows have one pool
                count = needed[id(pool)] = needed.get(id(pool), 0) + count
            if count > pool.pool.num_free and count > pool.num_available:
                most = pool.pool.num_blocks
                is_more = count + len(self._of(active).own[number]) > most
                missing = count - pool.num_available
                raise OutOfBlocksError(missing, 0, num_all=most if is_more else None, row=str(self._shapes[number]))

    def _num_new(self, active: ActiveRequest, row: int, num_blocks: int) -> int:
        """A state needs one slot, and has it from its first blocks on."""
        if row not in self.state_rows:
            return num_blocks
        return int(num_blocks > 0 and not self._of(active).own[row])

    def extend(self, active: ActiveRequest, first_block: int, num_blocks: int) -> tuple[RowTable, ...]:
        """Units for blocks [first_block, first_block + num_blocks) of each row; there is room. All of them or, on
        `MemoryError`, none."""
        rows, taken = self._of(active), [_NONE] * len(self._shapes)
        try:
            for number in range(len(taken)):
                taken[number] = self._rows.take(number, self._num_new(active, number, num_blocks), REQUEST)
            new = tuple([RowTable(first_block, units.tolist()) for units in taken])
            for number, units in enumerate(taken):
                rows.tables[number].extend(units)
                rows.own[number].update(units)
        except BaseException:
            self._undo(rows, taken)
            raise
        for number in self.state_rows:
            if taken[number]:
                rows.firsts[number] = first_block
                del rows.tables[number][:-1]  # the slot of the checkpoint at which it began
        return new

    def take_back(self, active: ActiveRequest, new: tuple[RowTable, ...]) -> None:
        """The reverse of `extend`, for what it gave last."""
        self._undo(self._of(active), [table.block_ids for table in new])

    def _undo(self, rows: RequestRows, taken: Sequence[Sequence[int]]) -> None:
        """Free these units, some of which may have joined their tables. Needs no memory."""
        for number, units in enumerate(taken):
            table = rows.tables[number]
            if units and table and table[-1] == units[-1]:
                del table[len(table) - len(units) :]
            rows.own[number].difference_update(units)
            self._rows.checkpoints.pools[number].pool.free_each(units, REQUEST)

    # -- commits

    def committed(self, active: ActiveRequest) -> None:
        """So many of its blocks are in the tree by now: checkpoints that were due are made, and what lies in front of
        all that it reads is free."""
        rows, num_blocks = self._of(active), active.num_committed_blocks
        if self._may_publish(active):
            if self.state_rows:
                self._take_snapshot_in(active, rows, num_blocks)
            else:
                for boundary in rows.wanted:
                    if rows.num_checked < boundary <= num_blocks:
                        self._publish(active, boundary, None)
        rows.num_checked = max(rows.num_checked, num_blocks)
        self._slide(active)

    def _may_publish(self, active: ActiveRequest) -> bool:
        """Whether what it has committed is what its pin holds, and is found by others."""
        is_current = active.generation >= self._tree.generations.last_reset
        return is_current and active.pin is not None and active.num_pinned_blocks == active.num_committed_blocks

    def drop_pending(self, active: ActiveRequest) -> None:
        """The snapshot that no commit has reached becomes no checkpoint."""
        rows = self._of(active)
        pending, rows.pending = rows.pending, None
        if pending is not None:
            self._free_slots(rows, pending)

    def _take_snapshot_in(self, active: ActiveRequest, rows: RequestRows, num_blocks: int) -> None:
        """A commit has reached what the pending snapshot is of, if it is of these tokens still: it is published, or of
        the output, kept as the newest one."""
        pending = rows.pending
        if pending is None or pending.boundary > num_blocks:
            return
        rows.pending = None
        end = pending.boundary * self._size * 4
        if (
            pending.tail and active.keys.part(end - len(pending.tail), end) != pending.tail
        ):  # a draft, and other tokens were accepted
            self._free_slots(rows, pending)
        elif pending.boundary <= (active.request.num_prompt_tokens - 1) // self._size:
            if not self._publish(active, pending.boundary, pending):
                self._end_passed(rows)
                rows.passed = pending
        else:
            if rows.newest is not None:
                self._free_slots(rows, rows.newest)
            rows.newest = pending

    def _end_passed(self, rows: RequestRows) -> None:
        passed, rows.passed = rows.passed, None
        if passed is not None:
            self._free_slots(rows, passed)

    def _free_slots(self, rows: RequestRows, snapshot: Snapshot) -> None:
        for number, slot in zip(self.state_rows, snapshot.slots, strict=True):
            rows.own[number].discard(slot)
            self._rows.checkpoints.pools[number].pool.free_each((slot,), REQUEST)

    def _publish(self, active: ActiveRequest, boundary: int, snapshot: Snapshot | None) -> bool:
        """Make a checkpoint; whether it has the request's units now. What fails costs the checkpoint alone."""
        try:
            return self._try_publishing(active, boundary, snapshot)
        except (MemoryError, AssertionError):
            self._books.mishaps.note("checkpoint")
            return False

    def _try_publishing(self, active: ActiveRequest, boundary: int, snapshot: Snapshot | None) -> bool:
        rows, slots = self._of(active), iter(snapshot.slots if snapshot is not None else ())
        units = [self._units_for(rows, number, boundary, slots) for number in range(len(self._shapes))]
        if any(each is None for each in units) or active.pin is None:
            return False
        run, end = self._tree.place(active.pin.run.path(), boundary)
        assert run is not None
        given = [each for each in units if each is not None]
        checkpoint, is_taken = self._rows.checkpoints.publish(run, end, boundary, given, REQUEST)
        if is_taken:
            for own, ids in zip(rows.own, given, strict=True):
                own.difference_update(ids)
            rows.anchors.append(checkpoint)  # it is pinned for us
            self._rows.limit_path(checkpoint, self._most_inner)
        rows.used = (*rows.used, checkpoint)
        return is_taken

    def _units_for(self, rows: RequestRows, number: int, boundary: int, slots: Iterator[int]) -> array[int] | None:
        """The units of a row at a boundary; None where the request has them no more."""
        row = self._shapes[number]
        if row.kind == "state":
            return array("i", [next(slots)])
        first = row.first_block(boundary) - rows.firsts[number]
        units = rows.tables[number][max(0, first) : boundary - rows.firsts[number]]
        return units if first >= 0 and len(units) == boundary - row.first_block(boundary) else None

    def _slide(self, active: ActiveRequest) -> None:
        """Free what lies in front of every position that is read any more, and let checkpoints go that lie there."""
        rows = self._of(active)
        least = active.num_computed_tokens // self._size
        for snapshot in (rows.pending, rows.newest):
            if snapshot is not None and snapshot.boundary < least:
                least = snapshot.boundary
        if rows.passed is not None and active.num_computed_tokens > rows.passed.boundary * self._size:
            self._end_passed(rows)
        if least == rows.num_slid:
            return
        rows.num_slid, reached = least, least
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

    def _free_units(self, rows: RequestRows, number: int, units: array[int]) -> None:
        own = rows.own[number]
        gone = array("i", [unit for unit in units if unit in own])
        if gone:
            own.difference_update(gone)
            self._rows.checkpoints.pools[number].pool.free(gone, REQUEST)

    # -- the end

    def finish(self, active: ActiveRequest) -> None:
        """It is about to be released: its last checkpoint is made."""
        rows, boundary = self._of(active), active.num_committed_blocks
        if not self._may_publish(active):
            return
        if rows.newest is not None:
            newest, rows.newest = rows.newest, None
            if not self._publish(active, newest.boundary, newest):
                self._free_slots(rows, newest)
        elif not self.state_rows and boundary:
            self._publish(active, boundary, None)

    def use(self, active: ActiveRequest) -> None:
        """Its path was used just now: so were the checkpoint at which it began, and those that it has made."""
        for checkpoint in self._of(active).used:
            if checkpoint.run is not None and checkpoint.run.epoch == self._tree.epoch:
                self._rows.checkpoints.use(checkpoint)

    def end(self, active: ActiveRequest) -> None:
        """It holds nothing of any row any more."""
        rows = self._of(active)
        for checkpoint in rows.anchors:
            self._rows.checkpoints.unpin(checkpoint)
        for pool, own in zip(self._rows.checkpoints.pools, rows.own, strict=True):
            pool.pool.free_each(own, REQUEST)
        rows.anchors, rows.used, rows.pending, rows.newest, rows.passed = [], (), None, None, None
        rows.own, rows.tables = [set() for _ in self._shapes], [array("i") for _ in self._shapes]
