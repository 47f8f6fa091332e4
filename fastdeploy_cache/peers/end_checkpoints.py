"""The checkpoints of a hybrid model at which hand-overs end. Of any other model there are none. Under the lock."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, deepest_within
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.errors import OutOfBlocksError
from fastdeploy_cache.movement.images import ImageMover


class EndCheckpoints:
    """Who pins one has pinned its path before, and lets it go after it."""

    def __init__(self, books: Books, images: ImageMover | None = None, most_inner: int | None = None) -> None:
        """`images`: between the tiers, which may hold units that come back. `most_inner`: of one path that are kept in
        front of one that has come."""
        self._books, self._images, self._most_inner = books, images, most_inner

    def keep(self, pin: Pin | None, boundary: int, *, on_gpu: bool = True) -> Checkpoint | None:
        """Pin the one behind so many blocks, at which `pin` ends; None where it is not there, or not on the GPU."""
        rows = self._books.rows
        checkpoint = deepest_within(pin.run, pin.end) if rows is not None and pin is not None else None
        if rows is None or checkpoint is None or checkpoint.boundary != boundary:
            return None
        if on_gpu and checkpoint.units is None:
            return None
        rows.checkpoints.pin(checkpoint)
        return checkpoint

    def unpin(self, checkpoint: Checkpoint | None) -> None:
        """The reverse. Needs no memory."""
        if checkpoint is not None and self._books.rows is not None:
            self._books.rows.checkpoints.unpin(checkpoint)

    def check_room(self, boundary: int) -> None:
        """Look whether there is room for the units of one behind so many blocks.

        Raises:
            OutOfBlocksError: a row has not that many.
        """
        if (rows := self._books.rows) is None:
            return
        sizes = rows.checkpoints.sizes
        if (lacking := rows.checkpoints.lacking(sizes.counts(boundary))) is not None:
            number, num_short = lacking
            num_coming = self._images.num_coming()[number] if self._images is not None else 0
            raise OutOfBlocksError(num_short, num_coming, row=str(sizes.rows[number]))

    def take(self, boundary: int) -> list[array[int]] | None:
        """Units for one behind so many blocks, by row, a task's; there is room. All of them or, on `MemoryError`,
        none."""
        if (rows := self._books.rows) is None:
            return None
        units: list[array[int]] = []
        try:
            for number, count in enumerate(rows.checkpoints.sizes.counts(boundary)):
                units.append(rows.take(number, count, TASK))
        except BaseException:
            rows.free_units(units)
            raise
        return units

    def free(self, units: list[array[int]] | None) -> None:
        """The reverse. Needs no memory."""
        if units is not None and self._books.rows is not None:
            self._books.rows.free_units(units)

    def publish(self, pin: Pin, boundary: int, units: list[array[int]]) -> tuple[Checkpoint, bool]:
        """A task's units hold the one behind so many blocks, at which `pin` ends. Returns it, pinned, and whether these
        units are its own: else one was made here meanwhile, and they are the task's still, as after an error."""
        rows = self._books.rows
        assert rows is not None
        depth = sum([run.num_blocks for run in pin.run.path()]) - pin.run.num_blocks + pin.end
        if depth < boundary:
            raise MemoryError("not all of the blocks in front of it could be inserted")
        checkpoint, is_taken = rows.checkpoints.publish(pin.run, pin.end, boundary, units, TASK)
        if not is_taken:
            rows.checkpoints.pin(checkpoint)
        elif self._most_inner is not None:
            try:
                rows.limit_path(checkpoint, self._most_inner)
            except MemoryError:  # it is there, and more than should be
                self._books.mishaps.note("checkpoint")
        return checkpoint, is_taken
