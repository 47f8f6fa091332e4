"""Units of checkpoints that are copied on the GPU into units which a request may write. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import GPU, Pin, Run
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.transfer_manager.task import TaskKind


class UnitCopy:
    """One unit on its way. See `fastdeploy_cache.books.transfer.Cargo`.

    Attributes:
        checkpoint: whose unit it is a copy of; pinned once for it.
        number: its row, behind the full one.
        units: the one destination, by row: the task's, and the request's once it has landed.
        is_wanted: until the request has settled without it.
    """

    def __init__(
        self, books: Books, rows: RowBooks, checkpoint: Checkpoint, number: int, units: list[array[int]]
    ) -> None:
        self._books, self._rows = books, rows
        self.checkpoint, self.number, self.units = checkpoint, number, units
        self.is_wanted, self.has_landed = True, False
        self.pins: Sequence[Pin] = ()
        self.transfer: Transfer | None = None
        self.ids: Sequence[int] = ()  # of the full row

    @property
    def own(self) -> array[int]:
        """The unit that it fills."""
        return self.units[self.number]

    def num_freed(self, held: dict[Run, int]) -> int:  # noqa: ARG002 (see `Cargo`)
        return 0

    def end(self, succeeded: bool) -> None:
        """The unit is its request's, if that still waits for it. Without memory it has come in vain."""
        pool = self._rows.checkpoints.pools[self.number].pool
        (pin,), self.pins = self.pins, ()
        self._rows.checkpoints.unpin(self.checkpoint)  # first: its path is pinned as long as it is
        self._books.tree.unpin(pin)
        if succeeded and self.is_wanted:
            try:
                pool.hand_over(self.own, TASK, REQUEST)
                self.has_landed = True
                return
            except MemoryError:
                self._books.mishaps.note("landing")
        pool.free_each(self.own, TASK)
        self.is_wanted = False

    def give_up(self) -> None:
        """Nobody wants it any more. Needs no memory."""
        if self.has_landed:
            self._rows.checkpoints.pools[self.number].pool.free_each(self.own, REQUEST)
        self.is_wanted = self.has_landed = False


class UnitCopier:
    """Starts them."""

    def __init__(self, books: Books, rows: RowBooks, mover: BlockMover) -> None:
        self._books, self._rows, self._mover = books, rows, mover

    def start(
        self, checkpoint: Checkpoint, numbers: Sequence[int], num_tokens: int | None, num_others: int = 0
    ) -> list[UnitCopy] | None:
        """Copy the last unit of each of these rows of a checkpoint that is on the GPU, or its first tokens alone. None:
        a row has no room, or the queue none for these tasks and others.

        All of them or, on `MemoryError`, none that anybody wants: what is on its way goes home when it has come.
        """
        tree, checkpoints, hold = self._books.tree, self._rows.checkpoints, Pin(checkpoint.run, checkpoint.end)
        made: list[UnitCopy] = []
        tree.pin(hold)  # what makes room must not take it, and it is no room itself
        try:
            checkpoints.pin(checkpoint)
            try:
                counts = [numbers.count(number) for number in range(len(checkpoints.pools))]
                if checkpoints.lacking(counts) is not None:
                    return None
                if not self._mover.can(TaskKind.COPY, len(numbers) + num_others):
                    return None
                for number in numbers:
                    self._send(checkpoint, number, num_tokens, made)
            except BaseException:
                for copy in made:
                    copy.give_up()
                raise
            finally:
                checkpoints.unpin(checkpoint)
        finally:
            tree.unpin(hold)
        return made

    def _send(self, checkpoint: Checkpoint, number: int, num_tokens: int | None, made: list[UnitCopy]) -> None:
        """One more, which is noted before it is sent: nothing behind that asks for memory."""
        units = [array("i") for _ in self._rows.checkpoints.pools]
        source, transfer = self._rows.checkpoints.unit_ids(checkpoint)[number][-1:], self._mover.new_transfer(GPU)
        units[number] = self._rows.take(number, 1, TASK)
        try:
            cargo = UnitCopy(self._books, self._rows, checkpoint, number, units)
            cargo.pins, cargo.transfer = (Pin(checkpoint.run, checkpoint.end),), transfer
            made.append(cargo)
            self._rows.checkpoints.pin(checkpoint)
            try:
                self._mover.send_unit(transfer, cargo, source, cargo.own, row=number + 1, num_tokens=num_tokens)
            except BaseException:
                made.pop()
                self._rows.checkpoints.unpin(checkpoint)
                raise
        except BaseException:
            self._rows.free_units(units)
            raise
