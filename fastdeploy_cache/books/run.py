"""A node of the prefix tree: a run of blocks with no branch in between, and the pins on it."""

from __future__ import annotations

import copy
from array import array
from dataclasses import dataclass
from enum import IntEnum

from fastdeploy_cache.books.block_hash import HASH_BYTES


class Tier(IntEnum):
    """The tiers whose blocks hang in the tree; an index into a run's per-tier fields."""

    GPU = 0
    CPU = 1


TIERS = GPU, CPU = tuple(Tier)
DEFAULT_PRIORITY = 35  # of a request that has none of its own, for the policy `priority`


@dataclass(slots=True)
class Usage:
    """How a run was used: what eviction policies decide by. Both parts of a split run have it."""

    last_used: int = 0  # order of uses over the whole cache
    used_at: float = 0.0  # the same in a policy's own time
    inserted: int = 0  # order of growths over the whole cache
    num_uses: int = 0  # requests whose prefix it was or became
    turn: int = 1  # requests in a row that went on where the one before had ended
    gap: float = 0.0  # before the last of them
    reuse_class: int = 0
    is_shared: bool = False  # prompts have parted behind it
    priority: float = DEFAULT_PRIORITY
    keep_until: float = 0.0  # in seconds; how long priority or pin is in force
    store_priority: float | None = None  # of the last request that used it and had one: for storage


class Run:
    """`num_blocks` consecutive blocks: [0, num_gpu) are on the GPU, [cpu_start, cpu_end) in the CPU tier::

        block    0 1 2 3 4 5 6 7
        held     x x x                  a pin keeps these: no eviction
        GPU      x x x x x              ids[GPU] has 5 ids
        CPU          x x x x x x        cpu_start 2, ids[CPU] has 6 ids

    Every block is in some tier. Only `PrefixTree` and `Residency` change a run.
    """

    __slots__ = (
        "children",
        "cpu_start",
        "epoch",
        "extras",
        "hashes",
        "ids",
        "num_blocks",
        "num_children_in",
        "num_held",
        "num_held_children",
        "num_offered",
        "num_stored",
        "offered_use",
        "parent",
        "pins",
        "queued",
        "tokens",
        "usage",
    )

    def __init__(self, parent: Run | None, epoch: int, usage: Usage) -> None:
        self.parent = parent
        self.epoch = epoch
        self.usage = usage
        self.tokens = bytearray()
        self.hashes = bytearray()  # of a root: what its first blocks have as their parent
        self.extras: dict[int, bytes] | None = None  # by block, where images or other extra keys overlap it
        self.num_blocks = 0
        self.children: dict[bytes, Run] = {}
        self.ids = (array("i"), array("i"))  # by Tier
        self.cpu_start = 0
        self.num_children_in = [0, 0]  # by Tier: children with blocks there
        self.pins: list[Pin] = []
        self.num_held_children = 0  # children with a pin in or beneath them
        self.num_held = 0  # blocks from the front that a pin, here or beneath, keeps where they are
        self.num_stored = 0  # blocks from the front that storage has taken; it may have dropped them since
        self.num_offered = 0  # blocks from the front that storage was offered, in the use of that number
        self.offered_use = 1
        self.queued: list[object] = [None, None]  # by Tier: a policy's mark of the entry that stands for this run

    @property
    def num_gpu(self) -> int:
        """Blocks on the GPU: the first ones."""
        return len(self.ids[0])

    @property
    def cpu_end(self) -> int:
        """The end of the interval of blocks with a CPU copy."""
        return self.cpu_start + len(self.ids[1])

    def num_in(self, tier: Tier, end: int) -> int:
        """How many of the blocks [0, end) are in a tier."""
        return min(end, len(self.ids[0])) if tier == 0 else max(0, min(end, self.cpu_end) - self.cpu_start)

    @property
    def last_hash(self) -> bytes:
        """The hash of the last block (of a root: the parent of its first blocks)."""
        return bytes(self.hashes[-HASH_BYTES:])

    def front(self, num_blocks: int, block_bytes: int) -> Run:
        """A run beside this one with what its first blocks have; this one is as before, until `cut_front`."""
        upper = Run(self.parent, self.epoch, copy.copy(self.usage))
        upper.usage.is_shared = True
        upper.num_blocks = num_blocks
        upper.tokens = self.tokens[: num_blocks * block_bytes]
        upper.hashes = self.hashes[: num_blocks * HASH_BYTES]
        if self.extras is not None:
            upper.extras = {block: extra for block, extra in self.extras.items() if block < num_blocks} or None
        upper.ids = self.ids[0][:num_blocks], self.ids[1][: max(0, num_blocks - self.cpu_start)]
        upper.cpu_start = self.cpu_start
        return upper

    def cut_front(self, upper: Run, block_bytes: int) -> None:
        """Leave to `upper`, which `front` has made, what it has: all of it or, on `MemoryError`, nothing."""
        cut, extras = upper.num_blocks, self.extras
        if extras is not None:
            extras = {b - cut: extra for b, extra in extras.items() if b >= cut} or None
        tokens, hashes = self.tokens[cut * block_bytes :], self.hashes[cut * HASH_BYTES :]
        self.tokens, self.hashes, self.extras = tokens, hashes, extras
        self.num_blocks -= cut
        self.cpu_start = max(0, self.cpu_start - cut)
        for own, gone in zip(self.ids, upper.ids, strict=True):
            del own[: len(gone)]
        self.cut_marks(upper)

    def cut_marks(self, upper: Run) -> None:
        """Storage's marks of a run whose first `upper.num_blocks` blocks are another's now."""
        cut = upper.num_blocks
        upper.num_stored, self.num_stored = min(self.num_stored, cut), max(0, self.num_stored - cut)
        upper.num_offered, self.num_offered = min(self.num_offered, cut), max(0, self.num_offered - cut)
        upper.offered_use = self.offered_use

    def join_marks(self, lower: Run) -> None:
        """The reverse, before `num_blocks` has grown."""
        if self.num_stored == self.num_blocks:
            self.num_stored += lower.num_stored
        if self.num_offered == self.num_blocks:
            self.num_offered += lower.num_offered
        self.offered_use = lower.offered_use

    def path(self) -> list[Run]:
        """The runs from below the root down to this one."""
        runs, run = [], self
        while run.parent is not None:
            runs.append(run)
            run = run.parent
        return runs[::-1]


class Pin:
    """Keeps blocks [0, end) of a run, and everything above it, where they are. Follows them when a run is cut."""

    __slots__ = ("end", "run")

    def __init__(self, run: Run, end: int) -> None:
        self.run = run
        self.end = end
