"""The blocks of one tier: which are free, and who owns each of the others."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import islice
from typing import Any, NoReturn

import numpy as np

from fastdeploy_cache.books.id_table import Ids, IdTable, new_id_table
from fastdeploy_cache.errors import BlockOwnerError


class Owner(IntEnum):
    """Every block id has exactly one."""

    FREE = 0
    RUN = 1
    REQUEST = 2
    TASK = 3
    CALLER = 4  # of an adapter: see `CallerBlocks`
    CHECKPOINT = 5  # a page of an image in the CPU tier: as a run's it would count as a full block that can be evicted


FREE, RUN, REQUEST, TASK, CALLER, CHECKPOINT = Owner  # looking a member up in its class costs as much as a dictionary


_WORDS = {FREE: "free", RUN: "cached", REQUEST: "a request's", TASK: "being copied into", CALLER: "a caller's own"}
_WORDS[CHECKPOINT] = "a checkpoint's"
_WHOLE = RUN, CHECKPOINT  # whose blocks hold nothing of before
_MARKED, _SOILED = 1, 2  # a block that is to be wiped when it is freed, and one that is freed and waits for that


class BlockPool:
    """Hands out ids 0..num_blocks-1, lowest first, and checks every hand-over. One thread at a time."""

    def __init__(self, name: str, num_blocks: int, new_table: Callable[[int], IdTable] = new_id_table) -> None:
        self.name = name
        self.num_blocks = num_blocks
        self._table = new_table(num_blocks)
        self.count: Callable[[Owner], int] = self._table.count  # blocks of this owner
        self.num_free = num_blocks  # that `allocate` can give: of the counts, the one that every verb looks at
        # Blocks that something reads which does not keep them from being freed. Of one that was freed meanwhile the
        # number is negative: it is a task's until the last reader has gone.
        self._num_readers: dict[int, int] = {}
        self.num_read = 0  # blocks that are being read and, if freed now, would not be free
        self._num_read_of = [0 for _ in Owner]  # how many of these each owner has
        self._one = array("i", [0])  # a block that goes home
        # Whose bytes nobody else may see: freed, they are a task's, to be wiped. A byte for each, once there are any;
        # no list of what waits, since to free a block needs no memory
        self._marks = bytearray()
        self.num_marked = 0  # also stale ones that are free, but none that is soiled
        self.num_soiled = 0  # freed ones, until somebody takes them to be wiped
        self.has_stale = False  # some of those that were free may be so yet
        self.on_soiled: Callable[[], object] | None = None  # called when there are more

    def owner(self, block_id: int) -> Owner:
        """Who owns a block."""
        return Owner(self._table.owners[block_id])

    # -- giving

    def allocate(self, num_blocks: int, owner: Owner) -> array[int]:
        """The lowest `num_blocks` free ids, now of `owner`. The caller has checked `num_free`."""
        ids = self._table.take(num_blocks, owner)
        self.num_free = self._table.num_free
        return ids

    def check(self, ids: Ids, owner: Owner) -> None:
        """Raise `BlockOwnerError` for the first of `ids` that is not of `owner`, is there twice, or was given back."""
        is_any_back = (self._num_readers or self.num_soiled) and any(map(self._is_back, ids))
        if is_any_back or not self._table.move(ids, owner, owner):
            self._refuse(ids, owner)

    def hand_over(self, ids: array[int], giver: Owner, taker: Owner) -> None:
        """Change the owner of `ids`, none of them free; all of them or, on `BlockOwnerError`, none."""
        if not self._table.move(ids, giver, taker):
            self._refuse(ids, giver)
        if self.num_marked and taker in _WHOLE:
            self._unmark(ids)
        if self._num_readers:
            num_read = sum(map(self._num_readers.__contains__, ids))
            self._num_read_of[giver] -= num_read
            self._num_read_of[taker] += num_read

    # -- reading without pinning

    def num_read_of(self, owner: Owner) -> int:
        """How many of the blocks that are being read are an owner's."""
        return self._num_read_of[owner]

    def ids_of(self, owner: Owner) -> list[int]:
        """Every id of an owner; a walk over the pool."""
        return np.flatnonzero(np.frombuffer(self._table.owners, np.uint8) == owner).tolist()

    @property
    def deferred_ids(self) -> list[int]:
        """Blocks that were freed, and are still being read or wait to be wiped."""
        soiled = [block_id for block_id, mark in enumerate(self._marks) if mark == _SOILED]
        return [*(block_id for block_id, num_readers in self._num_readers.items() if num_readers < 0), *soiled]

    def begin_reading(self, ids: array[int]) -> None:
        """Something slow reads these: their owner may free them any time, but they are given out only after
        `end_reading`."""
        num_begun = 0
        try:
            for block_id in ids:
                num_readers = self._num_readers.get(block_id, 0)
                self._num_readers[block_id] = num_readers + 1
                num_begun += 1
                if not num_readers:
                    self._num_read_of[self._table.owners[block_id]] += 1
                    self.num_read += 1
        except BaseException:
            self.end_reading(islice(ids, num_begun))
            raise

    def end_reading(self, ids: Iterable[int]) -> None:
        """Nobody reads them any more on behalf of that call. Needs no memory."""
        for block_id in ids:
            num_readers = self._num_readers[block_id]
            if abs(num_readers) > 1:
                self._num_readers[block_id] -= 1 if num_readers > 0 else -1
                continue
            del self._num_readers[block_id]
            self._num_read_of[self._table.owners[block_id]] -= 1
            self._one[0] = block_id
            if num_readers < 0 and self.num_marked and self._marks[block_id]:
                self._soil_one()
            elif num_readers < 0:
                self._table.move(self._one, TASK, FREE)
            else:
                self.num_read -= 1
        self.num_free = self._table.num_free

    def unread(self, ids: array[int]) -> array[int]:
        """Those that nothing reads."""
        readers = self._num_readers
        return array("i", [block_id for block_id in ids if block_id not in readers]) if readers else ids

    # -- ending

    def taint(self, ids: Ids) -> None:
        """Nobody else may see what these hold, none of which is free: when they are freed they are a task's, for
        `take_soiled`, and free when that frees them once more."""
        self._mark(np.frombuffer(ids, np.int32))

    def untaint(self, ids: Iterable[int]) -> None:
        """The reverse, of what is cached. Needs no memory."""
        if self._marks:
            self._unmark(ids)

    def note_stale(self) -> None:
        """The same of all that no run and no checkpoint has now: what they hold of before, nobody knows. Free ones are
        given out meanwhile, since nothing reads a block before it is written; and what is cached is written whole."""
        self._mark(np.flatnonzero(~np.isin(np.frombuffer(self._table.owners, np.uint8), _WHOLE)))
        self.has_stale = True

    def _view(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        if not self._marks:
            self._marks = bytearray(self.num_blocks)
        return np.frombuffer(self._marks, np.uint8)

    def _mark(self, ids: np.ndarray[Any, Any]) -> None:
        view = self._view()
        clean = ids[view[ids] == 0]
        view[clean] = _MARKED
        self.num_marked += len(clean)

    def _unmark(self, ids: Iterable[int]) -> None:
        for block_id in ids:
            if self._marks[block_id]:
                self._marks[block_id] = 0
                self.num_marked -= 1

    def _stale_free(self) -> np.ndarray[Any, Any]:
        owners = np.frombuffer(self._table.owners, np.uint8)
        return np.flatnonzero((owners == FREE) & (self._view() != 0))

    @property
    def num_stale(self) -> int:
        """How many are free that hold what nobody knows, and are not wiped yet; a walk over the pool."""
        return len(self._stale_free()) if self.has_stale else 0

    @property
    def num_read_out(self) -> int:
        """How many of the marked ones were freed, and are still being read."""
        marks, readers = self._marks, self._num_readers.items()
        return sum(num_readers < 0 and marks[block_id] > 0 for block_id, num_readers in readers) if marks else 0

    def soil_stale(self, at_most: int) -> None:
        """Have up to so many of the stale ones that are free wait to be wiped; a walk over the pool."""
        found = self._stale_free()
        ids = array("i", found[:at_most].tolist())
        self._table.move(ids, FREE, TASK)
        self.num_free = self._table.num_free
        self._unmark(ids)
        self.soil(ids)
        self.has_stale = len(found) > at_most  # none comes back: what is freed of them is soiled

    def soil(self, ids: Iterable[int]) -> None:
        """These, a task's, wait to be wiped, or to be wiped once more. Needs no memory."""
        for block_id in ids:
            self.num_marked -= self._marks[block_id] == _MARKED
            self._marks[block_id] = _SOILED
            self.num_soiled += 1

    def take_soiled(self) -> array[int]:
        """What waits is the caller's to wipe, and to free as a task's; a walk over the pool."""
        view = self._view()
        is_soiled = view == _SOILED
        ids = array("i", np.flatnonzero(is_soiled).tolist())
        view[is_soiled] = 0
        self.num_soiled = 0
        return ids

    def _soil_one(self) -> None:
        self.soil(self._one)
        if self.on_soiled is not None:
            self.on_soiled()

    def _mark_of(self, block_id: int) -> int:
        """None of an id that no block has: it is refused later."""
        return self._marks[block_id] if 0 <= block_id < len(self._marks) else 0

    def _is_back(self, block_id: int) -> bool:
        """Whether its owner has freed it, and it is a task's until nobody reads it and it is wiped."""
        return self._num_readers.get(block_id, 0) < 0 or (self.num_soiled > 0 and self._mark_of(block_id) == _SOILED)

    def free(self, ids: Ids, giver: Owner) -> None:
        """Take `ids` back from their owner; all of them or, on `BlockOwnerError`, none. Needs no memory."""
        is_read = self._num_readers and not self._num_readers.keys().isdisjoint(ids)
        if is_read or ((self.num_marked or self.num_soiled) and any(map(self._mark_of, ids))):
            self.check(ids, giver)
            self.free_each(ids, giver)
            return
        if not self._table.move(ids, giver, FREE):
            self._refuse(ids, giver)
        self.num_free = self._table.num_free

    def free_each(self, ids: Iterable[int], giver: Owner) -> None:
        """The same one after the other, for who has no list of them. On `BlockOwnerError` those before it are free.
        Needs no memory."""
        try:
            for block_id in ids:
                num_readers = self._num_readers.get(block_id, 0)
                self._one[0] = block_id
                is_soiled = not num_readers and self.num_marked > 0 and self._mark_of(block_id) == _MARKED
                taker = TASK if num_readers or is_soiled else FREE
                is_back = num_readers < 0 or (self.num_soiled > 0 and self._is_back(block_id))
                if is_back or not self._table.move(self._one, giver, taker):
                    self._refuse(self._one, giver)
                if is_soiled:
                    self._soil_one()
                elif num_readers:
                    self._num_readers[block_id] = -num_readers
                    self._num_read_of[giver] -= 1
                    self._num_read_of[TASK] += 1
                    self.num_read -= 1
        finally:
            self.num_free = self._table.num_free

    def _refuse(self, ids: Ids, giver: Owner) -> NoReturn:
        """Name the first id of `ids` that its giver may not give."""
        seen = set()
        for block_id in ids:
            if not 0 <= block_id < self.num_blocks:
                raise BlockOwnerError(f"{self.name} has no block {block_id}; ids are 0 to {self.num_blocks - 1}")
            is_twice = block_id in seen or self._is_back(block_id)
            if self._table.owners[block_id] != giver or is_twice:
                owner = "given twice" if is_twice else _WORDS[self.owner(block_id)]
                raise BlockOwnerError(
                    f"{self.name} block {block_id} is {owner}, not {_WORDS[giver]}; give each back once, by its owner"
                )
            seen.add(block_id)
        raise AssertionError("nothing to refuse")
