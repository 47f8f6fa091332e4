"""Units of the rows of a hybrid model that callers own: `cache.blocks.units`."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Sequence

from fastdeploy_cache.books.block_pool import CALLER
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoints import RowSizes
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.callers.own_blocks import OwnIds, as_ids
from fastdeploy_cache.errors import OutOfBlocksError, RequestError
from fastdeploy_cache.movement.images import ImageMover
from fastdeploy_cache.request import whole_number
from fastdeploy_cache.transfer_manager.task import LEFT_OUT


class CallerUnits:
    """Units for callers that keep their own requests. Rows are counted from 0, behind the full one, in the order in
    which `config check` prints them. Any thread; each verb is a turn of its own.

    Each verb raises `RequestError` for a model whose layers all keep everything.
    """

    def __init__(self, books: Books, images: ImageMover | None) -> None:
        self._books, self._images = books, images
        pools = books.rows.checkpoints.pools if books.rows is not None else ()
        distinct = {id(pool): OwnIds(books.tree, pool.pool) for pool in pools}  # two rows may have one pool
        self._own = [distinct[id(pool)] for pool in pools]

    def positions(self, num_blocks: int) -> tuple[range, ...]:
        """The blocks of which a checkpoint behind the first `num_blocks` of a sequence has units, by row."""
        if whole_number(num_blocks, "num_blocks") < 0:
            raise RequestError(f"positions behind {num_blocks} blocks; give 0 or more")
        with self._books:
            counts = self._sizes("blocks.units.positions").counts(operator.index(num_blocks))
        return tuple([range(num_blocks - count, num_blocks) for count in counts])

    def allocate(self, row: int, num_units: int) -> list[int]:
        """`num_units` units of a row for the caller, lowest ids first; what is coldest leaves the GPU for them.

        Raises:
            OutOfBlocksError: not that many can be had now; nothing was changed.
        """
        num_units = whole_number(num_units, "num_units")
        if num_units < 0:
            raise RequestError(f"allocate of {num_units} units; give 0 or more")
        with self._books:
            self._books.check_awake()
            pool = self._pool("blocks.units.allocate", row)
            rows, images = self._books.rows, self._images
            assert rows is not None and images is not None
            if num_units > pool.num_available:
                most, name = pool.pool.num_blocks, str(rows.checkpoints.sizes.rows[row])
                missing, coming = num_units - pool.num_available, images.num_coming()[row]
                raise OutOfBlocksError(missing, coming, num_all=most if num_units > most else None, row=name)
            return self._own[row].note_taken(rows.take(row, num_units, CALLER))

    def free(self, row: int, units: Sequence[int]) -> None:
        """The caller's units are free again; all of them or, on `BlockOwnerError`, none.

        One that is still being copied into is free once that has ended.
        """
        with self._books:
            self._pool("blocks.units.free", row)
            self._own[row].free(as_ids(units, "units"))

    # -- for copies, under the lock

    def own(self, row: int) -> OwnIds:
        """Those of a row."""
        return self._own[row]

    def checked(self, units: Sequence[Sequence[int]], boundary: int, *, may_leave_out: bool) -> list[array[int]]:
        """The units of a checkpoint, by row, all the caller's.

        Raises:
            RequestError: of another number of rows, or as many as another boundary has.
            BlockOwnerError: one is not the caller's, or is given twice.
        """
        sizes = self._sizes("a checkpoint")
        counts = sizes.counts(boundary)
        try:
            found = [as_ids(each, "units of a row") for each in units]
        except TypeError:
            raise RequestError(f"units are {units!r:.80}; give a list of ids for each row") from None
        if len(found) != len(counts):
            raise RequestError(f"units of {len(found)} rows; the model has {len(counts)} behind the full one")
        for number, (ids, count) in enumerate(zip(found, counts, strict=True)):
            if len(ids) != count:
                raise RequestError(
                    f"{len(ids)} units of the row {str(sizes.rows[number])!r}; a checkpoint behind {boundary} blocks "
                    f"has {count}: see `blocks.units.positions`"
                )
        for number, ids in enumerate(found):
            self._own[number].check(given(ids) if may_leave_out else ids)
        return found

    def are_current(self, units: Sequence[array[int]], generation: int | None) -> bool:
        """Whether these, by row, hold what they held when they were taken."""
        return all(own.are_current(ids, generation) for own, ids in zip(self._own, units, strict=True))

    def _sizes(self, verb: str) -> RowSizes:
        self._books.check_open()
        if self._books.rows is None:
            raise RequestError(f"{verb}: all layers of this model keep everything, so there are no units of rows")
        return self._books.rows.checkpoints.sizes

    def _pool(self, verb: str, row: int) -> UnitPool:
        rows = self._sizes(verb).rows
        if not 0 <= whole_number(row, "row") < len(rows):
            raise RequestError(f"{verb} of row {row}; rows behind the full one are 0 to {len(rows) - 1}")
        assert self._books.rows is not None
        return self._books.rows.checkpoints.pools[row]


def given(units: array[int]) -> array[int]:
    """Those that are not left out."""
    return array("i", [unit for unit in units if unit != LEFT_OUT])
