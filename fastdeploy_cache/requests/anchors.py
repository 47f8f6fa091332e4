"""Where requests of a hybrid model go on: they begin at checkpoints, and make some. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import REQUEST
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.path import gpu_ids, usable_end
from fastdeploy_cache.books.row_books import RowBooks, usable_checkpoints
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.requests.active_request import VOID, ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import CheckpointMaker, rows_of
from fastdeploy_cache.requests.room_queue import RoomNeed
from fastdeploy_cache.requests.row_loads import RowLoads
from fastdeploy_cache.requests.snapshots import Snapshots
from fastdeploy_cache.requests.tables import RequestRows, RowTable
from fastdeploy_cache.requests.waiting import pin_leading

_NONE = array("i")  # never changed


class Anchors:
    """The units of a request, from its match to its release, and the checkpoints that it keeps and makes.

    A checkpoint is made where requests return: at the last boundary of a prompt at which the same prompt could go on,
    where it parts from what is cached, at regular boundaries where the configuration asks for some, and at the last
    boundary of the whole request. Of a model with states only where the engine has taken a snapshot.
    """

    def __init__(
        self, config: CacheConfig, books: Books, rows: RowBooks, images: ImageMover, *, loads: RowLoads | None
    ) -> None:
        """`loads`: from the CPU tier, where there is one."""
        self._loads, self._images = loads, images
        self._books, self._tree, self._rows = books, books.tree, rows
        self._shapes, self._size = rows.checkpoints.sizes.rows, config.block_size
        self._every = config.checkpoint_every_tokens // config.block_size
        self._is_shared = len({id(pool) for pool in rows.checkpoints.pools}) < len(rows.checkpoints.pools)
        self._maker = CheckpointMaker(books, rows, config.checkpoints_per_path)
        self.snapshots = Snapshots(config, books, rows, self._maker)
        self.state_rows = self.snapshots.state_rows

    # -- the match

    def begin(self, active: ActiveRequest) -> None:
        """It has nothing of any row yet."""
        count = len(self._shapes)
        active.rows = RequestRows(
            [0] * count, [array("i") for _ in range(count)], [set() for _ in range(count)], [], []
        )

    def match(self, active: ActiveRequest, path: list[Run], num_found: int) -> array[int] | None:
        """Let it go on at the deepest checkpoint of a path on which so many blocks were found, and keep that. Returns
        the ids of the full blocks in front of it; None: the checkpoint, or some of these blocks, are on their way to
        the GPU."""
        deepest, on_gpu = usable_checkpoints(path, num_found, active.request, self._size)
        boundary = on_gpu.boundary if on_gpu is not None else 0
        last = (active.request.num_tokens - 1) // self._size
        rows, wanted = rows_of(active), {num_found, last}
        if self._every:
            wanted.update(range(self._every, last, self._every))
        if active.request.images:  # in an image none would be found by anybody who has that image
            wanted = {usable_end(active.request, each, self._size) for each in wanted}
        rows.wanted = tuple(sorted([each for each in wanted if boundary < each <= last]))
        rows.num_checked = active.num_gpu_blocks = boundary
        active.trail.num_whole_blocks = deepest.boundary if deepest is not None else 0
        if deepest is None:
            return array("i")
        active.trail.idle_since = path[-1].used_last
        if deepest is not on_gpu and self._loads is not None and self._loads.begin(active, path, deepest, on_gpu):
            return None
        pin_leading(self._tree, active, path, boundary)
        if on_gpu is None:
            return array("i")
        ids, tables = gpu_ids(path, boundary), self._rows.checkpoints.unit_ids(on_gpu)  # may need memory
        self._keep(rows, on_gpu)
        self._begin_at(rows, on_gpu, tables)
        return ids

    def _begin_at(self, rows: RequestRows, checkpoint: Checkpoint, tables: list[array[int]]) -> None:
        """It goes on there, and has these units of it."""
        rows.used.append(checkpoint)  # first: it may need memory
        boundary = rows.num_checked = checkpoint.boundary
        rows.matched, rows.firsts = tables, [row.first_block(boundary) for row in self._shapes]
        rows.matched_firsts = tuple(rows.firsts)
        rows.tables = [table if number in self.state_rows else table[:] for number, table in enumerate(tables)]

    def num_reached(self, active: ActiveRequest, num_blocks: int) -> int:
        """Where a match is that is not settled, so many leading blocks of which are on the GPU: all or, where it waits
        for a checkpoint, up to the deepest that is there with them."""
        reached = self._reached(rows_of(active), num_blocks)
        return num_blocks if rows_of(active).goal is None else reached.boundary if reached is not None else 0

    @staticmethod
    def _reached(rows: RequestRows, num_blocks: int) -> Checkpoint | None:
        places = (rows.goal, rows.base)
        there = [each for each in places if each is not None and each.units is not None]
        return next((each for each in there if each.boundary <= num_blocks), None)

    def settle(self, active: ActiveRequest, num_blocks: int) -> int:
        """Its match is fixed at so many blocks, which is where one of its checkpoints lies; how many of them it has
        then."""
        rows = rows_of(active)
        if rows.goal is None or self._loads is None:
            return num_blocks
        chosen = self._reached(rows, num_blocks)
        if chosen is not None:
            self._begin_at(rows, chosen, self._rows.checkpoints.unit_ids(chosen))
        self._loads.give_up(active, chosen)
        boundary = chosen.boundary if chosen is not None else 0
        rows.wanted = tuple([each for each in rows.wanted if each > boundary])
        return boundary

    # -- running ahead of its loads

    def units_ahead(self, active: ActiveRequest) -> list[array[int]] | None:
        """The units, by row, which hold the checkpoint that its match waits for once its load has come; None: there is
        no such load."""
        goal = rows_of(active).goal
        if goal is None:
            return None
        return self._rows.checkpoints.unit_ids(goal) if goal.units else self._images.units_of_load(goal)

    def begin_ahead(self, active: ActiveRequest, units: list[array[int]]) -> None:
        """It goes on at that checkpoint, as if it were there. All of it or, on `MemoryError`, nothing."""
        rows = rows_of(active)
        assert rows.goal is not None
        wanted = tuple([each for each in rows.wanted if each > rows.goal.boundary])
        self._begin_at(rows, rows.goal, units)
        rows.wanted = wanted

    def end_ahead(self, active: ActiveRequest, num_blocks: int) -> bool:
        """So many of its blocks are there. Whether the checkpoint is, too, in the units that it uses; it keeps the
        deepest that is there."""
        rows = rows_of(active)
        assert self._loads is not None
        reached, goal = self._reached(rows, num_blocks), rows.goal
        is_whole = reached is goal is not None and self._rows.checkpoints.unit_ids(goal) == list(rows.matched)
        self._loads.give_up(active, reached)
        return is_whole

    def loading(self, active: ActiveRequest) -> Transfer | None:
        """The load that brings the checkpoint which its match waits for."""
        return self._loads.loading(active) if self._loads is not None else None

    def stop_waiting_for_room(self, active: ActiveRequest, cause: Cause) -> None:
        """See `Matcher.stop_waiting_for_room`."""
        assert self._loads is not None, "without a tier below it nothing is loaded"
        self._loads.stop_waiting_for_room(active, cause)

    def tables(self, active: ActiveRequest, num_blocks: int, *, is_lost: bool) -> tuple[RowTable, ...]:
        """What the match has found of each row in front of so many blocks: it stays as it was when the request gets
        units of its own."""
        rows = rows_of(active)
        firsts, tables = rows.matched_firsts, rows.matched
        if active.phase is VOID:
            reached = rows.anchors[-1] if rows.anchors else None
        else:  # one that runs ahead has those of its goal already
            reached = self._reached(rows, num_blocks) if rows.goal is not None and not active.is_ahead else None
        if reached is not None:
            firsts = tuple([row.first_block(reached.boundary) for row in self._shapes])
            tables = self._rows.checkpoints.unit_ids(reached)
        elif active.phase is VOID:
            tables = ()
        if is_lost or not tables:
            return tuple([RowTable(0, []) for _ in self._shapes])
        return tuple([RowTable(first, table.tolist()) for first, table in zip(firsts, tables, strict=True)])

    def _keep(self, rows: RequestRows, checkpoint: Checkpoint) -> None:
        rows.anchors.append(checkpoint)  # first: it may need memory
        self._rows.checkpoints.pin(checkpoint)

    # -- more units

    def check_room(self, active: ActiveRequest, num_blocks: int) -> None:
        """Raise `OutOfBlocksError` for the first row that lacks units for so many more blocks. Before that the request
        gives up the states of its output that it keeps for its release, and what their windows hold."""
        short = self._out_of_units(active, num_blocks)
        if short is not None and rows_of(active).newest is not None:
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

    def committed(self, active: ActiveRequest) -> None:
        """So many of its blocks are in the tree by now: checkpoints that were due are made, and what lies in front of
        all that it reads is free."""
        rows, num_blocks = rows_of(active), active.num_committed_blocks
        is_found = self._is_found(active)
        if self.state_rows:
            self.snapshots.committed(active, rows, is_found=is_found)
        elif is_found:
            for boundary in rows.wanted:
                if rows.num_checked < boundary <= num_blocks:
                    self._maker.publish(active, boundary, None)
        rows.num_checked = max(rows.num_checked, num_blocks)
        self._slide(active)

    def _is_found(self, active: ActiveRequest) -> bool:
        """Whether what it has committed is what its pin holds, and is found by others."""
        is_current = active.generation >= self._tree.generations.last_reset
        return is_current and active.pin is not None and active.num_pinned_blocks == active.num_committed_blocks

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
        counted of a request, however often it was preempted.

        What it has left behind goes before all others: it went straight on from there, to a deeper one, at which the
        next turn will begin. Where prompts part it will not."""
        there = (each for each in rows_of(active).used if each.run is not None and each.run.epoch == self._tree.epoch)
        used = list(there)
        deepest = max([each.boundary for each in used], default=0)
        for checkpoint in used:
            run = checkpoint.run
            is_fork = checkpoint.end == run.num_blocks and len(run.children) > 1
            is_left = checkpoint.boundary < deepest and not is_fork
            self._rows.checkpoints.use(checkpoint, is_first=is_first, is_left=is_left)

    def end(self, active: ActiveRequest) -> None:
        """It holds nothing of any row any more. Needs no memory."""
        rows = active.rows
        if rows is None:  # there was no memory to begin
            return
        for checkpoint in rows.anchors:
            self._rows.checkpoints.unpin(checkpoint)
        for pool, own in zip(self._rows.checkpoints.pools, rows.own, strict=True):
            pool.pool.free_each(own, REQUEST)
            own.clear()
        rows.pending = rows.newest = rows.passed = rows.goal = rows.base = None
        for table in rows.tables:
            del table[:]
        rows.anchors.clear()
        rows.used.clear()
