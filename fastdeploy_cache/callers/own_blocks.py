"""The blocks and units that callers own: when each was taken, and which are still being copied into. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from fastdeploy_cache.books.block_pool import CALLER, TASK, BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.movement.cargo import CallersBlocks
from fastdeploy_cache.request import whole_number


class Filling:
    """Blocks or units of a caller's that a task writes."""

    __slots__ = ("ids", "unwanted")

    def __init__(self, ids: array[int]) -> None:
        self.ids = ids
        self.unwanted: set[int] = set()  # of these, those that their caller has given back meanwhile


class OwnIds:
    """Those of one pool. What they hold is worth something as long as nothing was forgotten since they were taken."""

    def __init__(self, tree: PrefixTree, pool: BlockPool) -> None:
        self._tree, self._pool = tree, pool
        self._taken: dict[int, int] = {}  # the generation of taking or filling
        self._filling: dict[int, Filling] = {}

    def check(self, ids: array[int]) -> None:
        """Raise `BlockOwnerError` unless all are the caller's, and none is there twice."""
        self._pool.check(ids, CALLER)

    def note_taken(self, ids: array[int]) -> list[int]:
        """Note when the caller got its blocks, and list them; they are free again where there is no memory for that."""
        try:
            self._taken.update(dict.fromkeys(ids, self._tree.generation))
            return ids.tolist()
        except MemoryError:
            self._pool.free(ids, CALLER)
            raise

    def are_current(self, ids: Iterable[int], generation: int | None = None) -> bool:
        """Whether these hold what they held when they were taken."""
        now, taken = self._tree.generation, self._taken
        return generation == now if generation is not None else all(taken.get(block_id) == now for block_id in ids)

    def oldest(self, ids: Iterable[int]) -> int:
        """The generation of the one that was taken first."""
        return min(self._taken.get(block_id, -1) for block_id in ids)

    def free(self, ids: array[int]) -> None:
        """All of them or, on `BlockOwnerError`, none. One that is being copied into is free once that has ended."""
        filling, pool = self._filling, self._pool
        own = array("i", [block_id for block_id in ids if block_id not in filling])
        if len(own) < len(ids):
            pool.check(own, CALLER)
            late = [block_id for block_id in ids if block_id in filling]
            pool.check(array("i", late), TASK)
            for block_id in late:
                filling.pop(block_id).unwanted.add(block_id)
        pool.free(own, CALLER)

    def fill(self, ids: array[int]) -> Filling:
        """The caller's blocks are a task's until `end_fill`. All of them or, on `MemoryError`, none."""
        begun = Filling(ids)
        try:
            self._filling.update(dict.fromkeys(ids, begun))
            self._pool.hand_over(ids, CALLER, TASK)
        except BaseException:
            for block_id in ids:
                if self._filling.get(block_id) is begun:
                    del self._filling[block_id]
            raise
        return begun

    def end_fill(self, filling: Filling, generation: int | None) -> None:
        """The reverse: they hold what is as old as `generation`; None: what they held before. Needs no memory."""
        ids, unwanted = filling.ids, filling.unwanted
        self._pool.hand_over(ids, TASK, CALLER)  # those that are unwanted, too: a list of the others would need memory
        for block_id in ids:
            if block_id not in unwanted:
                if generation is not None:
                    self._taken[block_id] = generation  # it is there already
                del self._filling[block_id]
        self._pool.free_each(unwanted, CALLER)


class Reading:
    """What a task reads that its owner may free any time: it is given out again when the task has ended."""

    def __init__(self, *parts: tuple[BlockPool, array[int]]) -> None:
        """Ids of some pools. All of them or, on `MemoryError`, none."""
        self._parts, self._num_begun = parts, 0
        try:
            for pool, ids in parts:
                pool.begin_reading(ids)
                self._num_begun += 1
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Nobody reads them any more on behalf of this one. Needs no memory."""
        for pool, ids in self._parts[: self._num_begun]:
            pool.end_reading(ids)


def cargo_of(
    books: Books,
    wanted: Sequence[tuple[OwnIds, array[int]]],
    reading: Reading,
    generation: int,
    *,
    pins: Sequence[Pin] = (),
    units: Sequence[array[int]] = (),
) -> CallersBlocks:
    """A task is to fill these of a caller's. When it has ended they are the caller's again, and hold what is as old as
    `generation`; the `reading` ends then, and where this gets no memory. `units`: of these, those of rows."""
    fillings = list[tuple[OwnIds, Filling]]()
    try:
        for own, ids in wanted:
            fillings.append((own, own.fill(ids)))
    except BaseException:
        for own, filling in fillings:
            own.end_fill(filling, None)
        reading.end()
        raise

    def give(_: bool) -> None:
        for own, filling in fillings:
            own.end_fill(filling, generation)
        reading.end()

    return CallersBlocks(books, array("i") if units else wanted[0][1], pins, give, units)


def as_first(first_block: int) -> int:
    """The number of a block."""
    first = first_block if type(first_block) is int else whole_number(first_block, "first_block")
    if first < 0:
        raise RequestError(f"first_block is {first}; blocks of a sequence are counted from 0")
    return first


def as_ids(block_ids: Sequence[int], what: str = "block ids") -> array[int]:
    """Ids as the books keep them."""
    try:
        return array("i", block_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"{what} are {block_ids!r:.80}: {error}; give a list of integers") from error
