"""What a request of a hybrid model holds of the rows behind the full one."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.movement.unit_copies import UnitCopy


class RowTable(NamedTuple):
    """Units of one row: `block_ids[i]` is that of block `first_block + i`. Earlier blocks are not read any more: there
    an engine has its null block. A row of states has one slot, of the state at the end of block `first_block`; or, of
    new blocks, the slot that the request writes from now on, or none where it has one already."""

    first_block: int
    block_ids: list[int]


class RowBlocks(NamedTuple):
    """New blocks of a request in all rows: those of the full row, behind those that it has, and a table of each further
    row, in the order in which `config check` prints them."""

    block_ids: list[int]
    tables: tuple[RowTable, ...]


class Snapshot(msgspec.Struct, eq=False, frozen=True):
    """States behind `boundary` blocks, in slots of the request's own, by row of states."""

    boundary: int
    slots: tuple[int, ...]
    tail: bytes  # tokens behind those that were committed then: of a draft that is rejected others come


class RequestRows(msgspec.Struct, eq=False):
    """What one request holds: for a window or a chunk, a table of positions [first, blocks of the request)::

        table   [ checkpoints' | own ]      what lies in front of what is read any more is gone

    For a state it is one slot: that of the checkpoint at which the request began, which is only read (or under
    `state_copy` a copy of it, which is its own), and its own from its first allocation on.
    """

    firsts: list[int]  # by row: the position of a table's first unit
    tables: list[array[int]]  # by row
    own: list[set[int]]  # by row: units that are the request's
    anchors: list[Checkpoint]  # that it keeps, once for each
    used: list[Checkpoint]  # at which it began, and that it has made
    goal: Checkpoint | None = None  # of a match that is not settled: where it will go on if all comes
    num_fixed: int | None = None  # blocks at which its match is being settled, which may have to be tried again
    matched: Sequence[array[int]] = ()  # by row: what the match has found
    matched_firsts: tuple[int, ...] = ()
    wanted: tuple[int, ...] = ()  # boundaries at which a checkpoint of its prompt pays
    num_slid: int = 0  # blocks in front of which nothing is read any more
    num_checked: int = 0  # boundaries up to here have been published, or passed
    pending: Snapshot | None = None  # that no commit has reached
    newest: Snapshot | None = None  # of its output: published when it is released
    passed: Snapshot | None = None  # that became no checkpoint, and whose states are read once more
    is_forgotten: bool = False  # with its namespace: what units it takes from then on are wiped when it frees them
    copies: Sequence[UnitCopy] = ()  # into units of its own, while the match is not settled
