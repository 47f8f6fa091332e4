"""A node of the prefix tree: a run of blocks with no branch in between, and what is in flight for it."""

from __future__ import annotations

import threading
from array import array
from dataclasses import dataclass, field
from enum import IntEnum

from fastdeploy_cache.block_hash import HASH_BYTES


class Tier(IntEnum):
    """The tiers whose blocks hang in the tree; an index into a run's per-tier fields."""

    GPU = 0
    CPU = 1


class Run:
    """`num_blocks` consecutive blocks: [0, num_gpu) are on the GPU, [cpu_start, cpu_end) in the CPU tier::

        block    0 1 2 3 4 5 6 7
        GPU      x x x x x              ids[GPU] has 5 ids
        CPU          x x x x x x        cpu_start 2, ids[CPU] has 6 ids

    Every block is in some tier. Only `PrefixTree` changes a run.
    """

    __slots__ = (
        "children",
        "cpu_start",
        "epoch",
        "hashes",
        "ids",
        "last_used",
        "loads",
        "num_blocks",
        "num_children_in",
        "parent",
        "pins",
        "queued",
        "stores",
        "tokens",
    )

    def __init__(self, parent: Run | None, epoch: int, tokens: bytes | bytearray, hashes: bytes | bytearray) -> None:
        self.parent = parent
        self.epoch = epoch
        self.tokens = bytearray(tokens)
        self.hashes = bytearray(hashes)
        self.num_blocks = len(hashes) // HASH_BYTES if parent is not None else 0
        self.children: dict[bytes, Run] = {}
        self.ids = [array("i"), array("i")]  # by Tier
        self.cpu_start = 0
        self.num_children_in = [0, 0]  # by Tier: children with blocks there
        self.pins = 0  # pins that end here or anywhere beneath
        self.last_used = 0
        self.queued = [-1, -1]  # by Tier: the last_used under which it waits for eviction
        self.loads: list[Segment] = []
        self.stores: list[Segment] = []

    @property
    def num_gpu(self) -> int:
        """Blocks on the GPU: the first ones."""
        return len(self.ids[Tier.GPU])

    @property
    def cpu_end(self) -> int:
        """The end of the interval of blocks with a CPU copy."""
        return self.cpu_start + len(self.ids[Tier.CPU])

    @property
    def last_hash(self) -> bytes:
        """The hash of the last block (of a root: the parent of its first blocks)."""
        return bytes(self.hashes[-HASH_BYTES:])

    def path(self) -> list[Run]:
        """The runs from below the root down to this one."""
        runs, run = [], self
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        return runs[::-1]


@dataclass(eq=False)
class Transfer:
    """A copy in flight and the segments it fills; `done` is set when it has ended, well or not."""

    task_id: int
    tier: Tier  # the destination
    segments: list[Segment] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False)
class Segment:
    """Blocks [start, start + len(ids)) of a run on their way to `ids` in the transfer's tier. Pins its run."""

    transfer: Transfer
    run: Run
    start: int
    ids: array[int]

    @property
    def end(self) -> int:
        """One past the last block."""
        return self.start + len(self.ids)
