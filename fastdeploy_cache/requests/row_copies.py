"""Units of its own with which a request of a hybrid model begins, copied before its match settles. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.movement.unit_copies import UnitCopier, UnitCopy
from fastdeploy_cache.requests.active_request import ActiveRequest
from fastdeploy_cache.requests.checkpoint_maker import rows_of
from fastdeploy_cache.requests.tables import RequestRows
from fastdeploy_cache.requests.waiting import wait_for


class RowCopies:
    """With `state_copy`, of the state at which a request goes on, for kernels that write where they read. Under
    `recompute_last_token`, of the last unit of each window, beside the last block of the full row."""

    def __init__(self, rows: RowBooks, copier: UnitCopier, *, copies_states: bool) -> None:
        self._rows, self._copier = rows, copier
        shapes = rows.checkpoints.sizes.rows
        self._states = [number for number, row in enumerate(shapes) if row.kind == "state"]
        self._windows = [number for number, row in enumerate(shapes) if row.kind != "state"]
        self.copies_states = copies_states

    def is_due(self, active: ActiveRequest) -> bool:
        """Whether the state has to be copied before the request can go on."""
        return self.copies_states and not rows_of(active).copies

    def is_ready(self, rows: RequestRows, checkpoint: Checkpoint) -> bool:
        """Whether a request can go on at a checkpoint of its match that is on the GPU."""
        return not self.copies_states or any(each.checkpoint is checkpoint and each.has_landed for each in rows.copies)

    def start_states(self, active: ActiveRequest, checkpoint: Checkpoint) -> bool:
        """Copy its state; False where there is no slot for it, or no place in the queue."""
        return self._start(active, self._copier.start(checkpoint, self._states, None))

    def start_windows(self, active: ActiveRequest, checkpoint: Checkpoint, num_tokens: int) -> bool:
        """Copy the first tokens of the last unit of each row, beside a block of the full row; False where one has none,
        or there is no room."""
        if self._states or not all(self._rows.checkpoints.sizes.counts(checkpoint.boundary)):
            return False
        return self._start(active, self._copier.start(checkpoint, self._windows, num_tokens, num_others=1))

    def _start(self, active: ActiveRequest, copies: list[UnitCopy] | None) -> bool:
        if copies is None:
            return False
        rows = rows_of(active)
        rows.copies = copies
        try:
            wait_for(active, [copy.transfer for copy in copies if copy.transfer is not None])
        except BaseException:
            self.give_up(rows)
            raise
        return True

    @staticmethod
    def have_landed(rows: RequestRows) -> bool:
        """Whether all are the request's."""
        return all(each.has_landed for each in rows.copies)

    def take_states(self, rows: RequestRows) -> None:
        """It goes on in slots of its own, if its states are copied. All of it or, on `MemoryError`, nothing."""
        if self.copies_states:
            tables, matched = [*rows.tables], [*rows.matched]
            for copy in rows.copies:
                # Copies: what the task has read its ids from is not to be made shorter.
                tables[copy.number], matched[copy.number] = copy.own[:], copy.own[:]
            self._take(rows, tables, matched)

    def take_windows(self, rows: RequestRows) -> None:
        """The last unit of each window is its own copy. All of it or, on `MemoryError`, nothing."""
        tables, matched = [*rows.tables], [*(rows.matched or rows.tables)]  # in front of one block there is none
        firsts = rows.matched_firsts or tuple(rows.firsts)
        for copy in rows.copies:
            tables[copy.number], matched[copy.number] = tables[copy.number] + copy.own, matched[copy.number] + copy.own
        self._take(rows, tables, matched)
        rows.matched_firsts = firsts

    @staticmethod
    def _take(rows: RequestRows, tables: list[array[int]], matched: list[array[int]]) -> None:
        own = [*rows.own]
        for copy in rows.copies:
            own[copy.number] = own[copy.number].union(copy.own)
        rows.own, rows.tables, rows.matched, rows.copies = own, tables, matched, ()

    @staticmethod
    def give_up(rows: RequestRows) -> None:
        """It goes on without what has been copied, or not. Needs no memory."""
        for copy in rows.copies:
            copy.give_up()
        rows.copies = ()
