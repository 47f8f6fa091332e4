"""The blocks that callers own: when each was taken, and which are still being copied into. Under the lock."""

from __future__ import annotations

import operator
from array import array
from collections.abc import Callable, Iterable, Sequence

from fastdeploy_cache.books.block_pool import CALLER, TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.run import GPU, Pin, Tier
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.movement.cargo import CallersBlocks


class OwnBlocks:
    """What callers' blocks hold is worth something as long as nothing was forgotten since they were taken."""

    def __init__(self, books: Books) -> None:
        self._books, self._tree = books, books.tree
        self._taken: tuple[dict[int, int], dict[int, int]] = ({}, {})  # by Tier: the generation of taking or filling
        self._filling: tuple[dict[int, CallersBlocks], dict[int, CallersBlocks]] = ({}, {})  # by Tier: copied into

    def note_taken(self, ids: array[int], tier: Tier) -> list[int]:
        """Note when the caller got its blocks, and list them; they are free again where there is no memory for that."""
        try:
            self._taken[tier].update(dict.fromkeys(ids, self._tree.generation))
            return ids.tolist()
        except MemoryError:
            self._tree.pools[tier].free(ids, CALLER)
            raise

    def are_current(self, ids: Iterable[int], generation: int | None = None) -> bool:
        """Whether these hold what they held when they were taken."""
        now, taken = self._tree.generation, self._taken[GPU]
        return generation == now if generation is not None else all(taken.get(block_id) == now for block_id in ids)

    def oldest(self, ids: Iterable[int], tier: Tier) -> int:
        """The generation of the one that was taken first."""
        return min(self._taken[tier].get(block_id, -1) for block_id in ids)

    def free(self, ids: array[int], tier: Tier) -> None:
        """All of them or, on `BlockOwnerError`, none. One that is being copied into is free once that has ended."""
        filling, pool = self._filling[tier], self._tree.pools[tier]
        own = array("i", [block_id for block_id in ids if block_id not in filling])
        if len(own) < len(ids):
            pool.check(own, CALLER)
            late = [block_id for block_id in ids if block_id in filling]
            pool.check(array("i", late), TASK)
            for block_id in late:
                filling.pop(block_id).unwanted.add(block_id)
        pool.free(own, CALLER)

    def fill(
        self,
        ids: array[int],
        tier: Tier,
        generation: int,
        *,
        pins: Sequence[Pin] = (),
        then: Callable[[], None] = lambda: None,
    ) -> CallersBlocks:
        """The caller's blocks are the task's until it has ended; then they hold what is as old as `generation`.

        `then` is called at that end, and where this gets no memory, which changes nothing.
        """
        pool, filling, taken = self._tree.pools[tier], self._filling[tier], self._taken[tier]

        def give(_: bool) -> None:
            pool.hand_over(ids, TASK, CALLER)  # those that are unwanted, too: a list of the others would need memory
            for block_id in ids:
                if block_id not in cargo.unwanted:
                    taken[block_id] = generation  # it is there already
                    del filling[block_id]
            pool.free_each(cargo.unwanted, CALLER)
            then()

        cargo = CallersBlocks(self._books, ids, pins, give)
        try:
            filling.update(dict.fromkeys(ids, cargo))
            pool.hand_over(ids, CALLER, TASK)
        except BaseException:
            for block_id in ids:
                if filling.get(block_id) is cargo:
                    del filling[block_id]
            then()
            raise
        return cargo


def as_first(first_block: int) -> int:
    """The number of a block."""
    first = operator.index(first_block)
    if first < 0:
        raise RequestError(f"first_block is {first}; blocks of a sequence are counted from 0")
    return first


def as_ids(block_ids: Sequence[int]) -> array[int]:
    """Block ids as the books keep them."""
    try:
        return array("i", block_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(f"block ids are {block_ids!r:.80}: {error}; give a list of integers") from error
