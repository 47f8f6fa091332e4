"""Where a match of a hybrid model ends: at a checkpoint, there or on its way. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.causes import Cause
from fastdeploy_cache.books.checkpoint import Checkpoint, deepest_within
from fastdeploy_cache.books.path import gpu_ids, num_gpu, usable_end
from fastdeploy_cache.books.row_books import RowBooks, usable_checkpoints
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.requests.active_request import VOID, ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import rows_of
from fastdeploy_cache.requests.row_copies import RowCopies
from fastdeploy_cache.requests.row_loads import RowLoads, give_up
from fastdeploy_cache.requests.tables import RequestRows, RowTable
from fastdeploy_cache.requests.waiting import pin_leading


class RowMatches:
    """The match of a request, from the search for a checkpoint until it is settled, or the request runs ahead."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        rows: RowBooks,
        images: ImageMover,
        *,
        loads: RowLoads | None,
        copies: RowCopies,
    ) -> None:
        """`loads`: from the CPU tier, where there is one."""
        self._loads, self._images, self.copies = loads, images, copies
        self._tree, self._rows, self._size = books.tree, rows, config.block_size
        self._shapes = rows.checkpoints.sizes.rows
        self._every = config.checkpoint_every_tokens // config.block_size

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
        if self.copies.is_due(active):
            rows.goal = on_gpu
            if active.is_fetching or self.copy_state(active):  # else it is copied when nothing deeper comes
                return None
            give_up(self._rows.checkpoints, rows)
            pin_leading(self._tree, active, path, 0)
            return array("i")
        self._begin_at(rows, on_gpu, tables)
        return ids

    def grow(self, active: ActiveRequest, path: list[Run], num_found: int) -> None:
        """A checkpoint has come from storage: load it, if it is deeper than all that the match has."""
        rows = rows_of(active)
        deepest, _ = usable_checkpoints(path, num_found, active.request, self._size)
        here = max((each.boundary for each in rows.anchors), default=0)
        if deepest is None or deepest.boundary <= here or self._loads is None:
            return
        active.trail.num_whole_blocks = deepest.boundary
        tables = [array("i") for _ in self._shapes]  # first: it may need memory
        if self._loads.extend(active, path, deepest):
            self._begin_at_nothing(rows, tables)  # where it goes on is decided when it settles

    def copy_state(self, active: ActiveRequest) -> bool:
        """Copy the state of the deepest checkpoint of its match that is there with its full KV, where that is due and
        all loads have ended; whether this has begun now."""
        rows = rows_of(active)
        if rows.goal is None or not self.copies.is_due(active) or active.room is not None or active.pin is None:
            return False
        if active.is_fetching or not all(transfer.done.is_set() for transfer in active.loads):
            return False
        num_blocks = len(gpu_ids(active.pin.run.path(), active.num_pinned_blocks))
        there = [each for each in reversed(rows.anchors) if each.units is not None]
        found = next((each for each in there if each.boundary <= num_blocks), None)
        if found is None:
            return False
        if not self.copies.start_states(active, found):
            active.trail.refused_for = Cause.ROOM, "there is no slot into which its state could be copied, or no place"
            active.num_unloaded_blocks = found.boundary
            return False
        return True

    def copy_last(self, active: ActiveRequest, run: Run, end: int, num_tokens: int) -> bool:
        """Copy the first tokens of each window's last unit in front of a place, of a checkpoint that lies there."""
        there = deepest_within(run, end)
        if there is None or there.end != end or there.units is None:
            return False
        return self.copies.start_windows(active, there, num_tokens)

    def _begin_at(self, rows: RequestRows, checkpoint: Checkpoint, tables: list[array[int]]) -> None:
        """It goes on there, and has these units of it. All of it or, on `MemoryError`, nothing."""
        boundary = checkpoint.boundary
        firsts = [row.first_block(boundary) for row in self._shapes]
        matched_firsts = tuple(firsts)
        own = [table if row.kind == "state" else table[:] for row, table in zip(self._shapes, tables, strict=True)]
        rows.used.append(checkpoint)
        rows.num_checked, rows.matched, rows.firsts = boundary, tables, firsts
        rows.matched_firsts, rows.tables = matched_firsts, own

    def num_reached(self, active: ActiveRequest, num_blocks: int) -> int:
        """Where a match is that is not settled, so many leading blocks of which are on the GPU: all or, where it waits
        for a checkpoint, up to the deepest that is there with them."""
        rows = rows_of(active)
        if rows.num_fixed is not None:
            return min(num_blocks, rows.num_fixed)
        if active.phase is VOID:
            return min(num_blocks, active.num_matched_blocks)
        reached = self._reached(rows, num_blocks)
        return num_blocks if rows_of(active).goal is None else reached.boundary if reached is not None else 0

    def _reached(self, rows: RequestRows, num_blocks: int) -> Checkpoint | None:
        for each in reversed(rows.anchors):
            if each.units is not None and each.boundary <= num_blocks and self.copies.is_ready(rows, each):
                return each
        return None

    def settle(self, active: ActiveRequest, num_blocks: int) -> int:
        """Its match is fixed at so many blocks, which is where one of its checkpoints lies; how many of them it has
        then. All of it or, on `MemoryError`, nothing. What follows may need memory, too: until it is `settled`, this
        can be asked again."""
        rows = rows_of(active)
        if rows.num_fixed is not None:
            return rows.num_fixed
        if rows.goal is None:
            return num_blocks if self._keeps_all(rows, num_blocks) else 0
        chosen = self._reached(rows, num_blocks)
        boundary = chosen.boundary if chosen is not None else 0
        wanted = tuple([each for each in rows.wanted if each > boundary])
        if chosen is not None:
            self._begin_at(rows, chosen, self._rows.checkpoints.unit_ids(chosen))
            try:
                self.copies.take_states(rows)
            except BaseException:
                rows.used.pop()
                raise
        rows.num_fixed, rows.wanted = boundary, wanted
        give_up(self._rows.checkpoints, rows, chosen)
        return boundary

    def _keeps_all(self, rows: RequestRows, num_blocks: int) -> bool:
        """Whether the checkpoint at which it was to go on is still there with its full KV, of which so many blocks are.
        Else the GPU's bytes have gone, and it begins anew."""
        if not rows.anchors or rows.anchors[-1].boundary <= num_blocks:
            return True
        self._begin_at_nothing(rows, [array("i") for _ in self._shapes])
        give_up(self._rows.checkpoints, rows)
        return False

    @staticmethod
    def _begin_at_nothing(rows: RequestRows, tables: list[array[int]]) -> None:
        """The reverse of `_begin_at`."""
        rows.firsts, rows.tables = [0] * len(tables), tables
        rows.matched, rows.matched_firsts, rows.num_checked = (), (), 0
        rows.used.clear()

    def settled(self, active: ActiveRequest) -> None:
        """It is. Needs no memory."""
        rows = rows_of(active)
        rows.num_fixed = None
        if rows.copies:
            self.copies.give_up(rows)

    # -- running ahead of its loads

    def units_ahead(self, active: ActiveRequest) -> list[array[int]] | None:
        """The units, by row, which hold the checkpoint that its match waits for once its load has come; None: there is
        no such load."""
        goal = rows_of(active).goal
        if goal is None or self.copies.is_due(active) or rows_of(active).copies:
            return None
        if goal.units:
            return self._rows.checkpoints.unit_ids(goal)
        units = self._images.units_of_load(goal)
        # Copies: what a task has read its ids from is not to be made shorter.
        return [ids[:] for ids in units] if units is not None else None

    def begin_ahead(self, active: ActiveRequest, units: list[array[int]]) -> None:
        """It goes on at that checkpoint, as if it were there. All of it or, on `MemoryError`, nothing."""
        rows = rows_of(active)
        assert rows.goal is not None
        wanted = tuple([each for each in rows.wanted if each > rows.goal.boundary])
        self._begin_at(rows, rows.goal, units)
        rows.wanted = wanted

    def has_come(self, active: ActiveRequest, num_blocks: int) -> bool:
        """Whether the checkpoint at which it goes on is there with its full blocks, of which so many are, in the units
        that it uses."""
        rows = rows_of(active)
        reached, goal = self._reached(rows, num_blocks), rows.goal
        return reached is goal is not None and self._rows.checkpoints.unit_ids(goal) == list(rows.matched)

    def confirmed(self, active: ActiveRequest) -> None:
        """It has gone on at its checkpoint, and needs no other. Needs no memory."""
        rows = rows_of(active)
        give_up(self._rows.checkpoints, rows, rows.goal)

    @staticmethod
    def end_ahead(active: ActiveRequest) -> None:
        """It publishes nothing, and keeps all that it has read, or reads still: until its release its pin stays as deep
        as it was, and so do its checkpoints. Needs no memory."""
        rows = rows_of(active)
        rows.goal = None

    def keep_on_gpu(self, active: ActiveRequest) -> None:
        """It keeps nothing that another tier alone has: one whose load has not come has kept that until now."""
        rows = rows_of(active)
        if active.pin is None or active.pin.run.epoch != self._tree.epoch:
            return
        path = active.pin.run.path()
        num_blocks = num_gpu(path, active.num_pinned_blocks)
        for each in [each for each in rows.anchors if each.units is None or each.boundary > num_blocks]:
            rows.anchors.remove(each)
            self._rows.checkpoints.unpin(each)
        if num_blocks < active.num_pinned_blocks:
            pin_leading(self._tree, active, path, num_blocks)

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
            reached = next((each for each in rows.anchors if each.boundary == num_blocks and each.units), None)
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
