"""A node of the prefix tree: a run of blocks with no branch in between, and the pins on it."""

from __future__ import annotations

import copy
from array import array
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any, cast
from zlib import crc32

import msgspec

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.block_marks import MARK_BYTES
from fastdeploy_cache.books.block_pool import RUN, BlockPool
from fastdeploy_cache.books.checkpoint import Checkpoint, join_chain, part_chain
from fastdeploy_cache.books.large_dict import LargeDict, put
from fastdeploy_cache.books.run_notes import NO_NOTES, NOT_STORED, PolicyNotes, Stored


class Tier(IntEnum):
    """The tiers whose blocks hang in the tree; an index into a run's per-tier fields."""

    GPU = 0
    CPU = 1


TIERS = GPU, CPU = tuple(Tier)
ID_BYTES = 4  # of a packed block id
_SHORT_BYTES = 4096  # so much is kept as `bytes`, which are smaller; more as a `bytearray`, which is cut in place
Children = dict[bytes, "Run"] | LargeDict[bytes, "Run"]
NO_CHILDREN: Mapping[bytes, Run] = MappingProxyType({})


def as_kept(packed: bytes | bytearray) -> bytes | bytearray:
    """Packed ids, as a run has them: see `_SHORT_BYTES`."""
    return bytearray(packed) if type(packed) is bytes and len(packed) > _SHORT_BYTES else packed


class Run(msgspec.Struct, gc=False, eq=False):
    """`num_blocks` consecutive blocks: [0, num_gpu) are on the GPU, [cpu_start, cpu_end) in the CPU tier::

        block    0 1 2 3 4 5 6 7
        held     x x x                  a pin keeps these: no eviction
        GPU      x x x x x              gpu has the ids of 5
        CPU          x x x x x x        cpu_start 2, cpu has the ids of 6

    Every block is in some tier. Only `PrefixTree` and `Residency` change a run. A large cache has hundreds of thousands
    of them, so what most runs have none of is one empty thing for all, and the garbage collector sees neither a run nor
    anything that a run has: whoever takes a run out of the tree cuts it off from its parent, and the end of a tree does
    so for all (`cut_off`).
    """

    parent: Run | None
    epoch: int
    tokens: bytes | bytearray = b""
    hashes: bytes | bytearray = b""  # of its first blocks, as far as somebody has asked: see `BlockNames`
    extras: dict[int, bytes] | None = None  # by block, where images or other extra keys overlap it
    num_blocks: int = 0
    children: Mapping[bytes, Run] | LargeDict[bytes, Run] = NO_CHILDREN  # see `add_child`
    gpu: bytes | bytearray = b""  # ids of its blocks there, as packed int32; an `array` the collector would look at
    cpu: bytes | bytearray = b""
    cpu_start: int = 0
    num_gpu_children: int = 0  # children with blocks there
    num_cpu_children: int = 0
    pins: tuple[Pin, ...] = ()
    num_held_children: int = 0  # children with a pin in or beneath them
    num_held: int = 0  # blocks from the front that a pin, here or beneath, keeps where they are
    stored: Stored = NOT_STORED
    queued_gpu: object = None  # a policy's mark of its place among the leaves of that tier
    queued_cpu: object = None
    block_marks: bytes = b""  # of its first blocks, as far as somebody has asked: see `References`
    checkpoint: Checkpoint | None = None  # its deepest; see there
    author: int = 0  # a recorded request whose tokens go through all of this run; 0: nobody knows one
    number: int = 0  # by which a publisher of events knows it; 0: none does
    namespace: str = ""  # of a root alone
    tenant: int = 0  # of its namespace; see `Shares`
    session: int = 0  # whose requests alone have used it: see `Books.use`; 0: no session's, -1: not one session's alone
    # -- how it was used: what eviction policies decide by. Both parts of a split run have it
    last_used: int = 0  # order of uses over the whole cache
    inserted: int = 0  # order of growths over the whole cache
    num_uses: int = 0  # requests whose prefix it was or became
    is_shared: bool = False  # prompts have parted behind it
    notes: PolicyNotes = NO_NOTES
    gpu_since: float = 0.0  # by the monotonic clock, for metrics alone: see `Ages`
    cpu_since: float = 0.0
    used_last: float = 0.0  # 0: no request that used it has ended

    def __repr__(self) -> str:
        """Itself alone: all that it refers to is the whole tree."""
        return f"Run({self.num_blocks} blocks, epoch {self.epoch})"

    @property
    def usage(self) -> Usage:
        """What policies of others decide by."""
        return Usage(self)

    @property
    def num_gpu(self) -> int:
        """Blocks on the GPU: the first ones."""
        return len(self.gpu) // ID_BYTES

    @property
    def cpu_end(self) -> int:
        """The end of the interval of blocks with a CPU copy."""
        return self.cpu_start + len(self.cpu) // ID_BYTES

    def num_in(self, tier: Tier, end: int) -> int:
        """How many of the blocks [0, end) are in a tier."""
        return min(end, self.num_gpu) if tier == 0 else max(0, min(end, self.cpu_end) - self.cpu_start)

    def packed_ids(self, tier: Tier) -> bytes | bytearray:
        """Its ids in a tier, as it has them."""
        return self.cpu if tier else self.gpu

    def ids_in(self, tier: Tier, start: int = 0, end: int | None = None) -> array[int]:
        """A copy of its ids in a tier, or of those from one place to another in its interval there."""
        packed = self.cpu if tier else self.gpu
        if start or end is not None:
            packed = packed[start * ID_BYTES : None if end is None else end * ID_BYTES]
        return array("i", packed)

    def add_ids(self, tier: Tier, ids: array[int]) -> None:
        """More blocks at the end of its interval in a tier; all of them or, on `MemoryError`, none."""
        known = self.cpu if tier else self.gpu
        known += ids
        if len(known) > _SHORT_BYTES and type(known) is bytes:
            known = bytearray(known)
        if tier:
            self.cpu = known
        else:
            self.gpu = known

    def free_ids(self, tier: Tier, num_left: int, pool: BlockPool) -> None:
        """Give all but so many at the end of its interval in a tier back to the pool. Needs no memory but for what is
        short: room may be made because there is none."""
        packed, size = self.cpu if tier else self.gpu, num_left * ID_BYTES
        if type(packed) is bytes:
            left, gone_ids = packed[:size], array("i", packed[size:])  # first: they may need memory, though little
            pool.free(gone_ids, RUN)
            packed = left
        else:
            with memoryview(packed) as whole, whole[size:] as end, end.cast("i") as gone:
                pool.free(gone, RUN)
            del packed[size:]  # type: ignore[union-attr]
        if tier:
            self.cpu = packed
        else:
            self.gpu = packed

    def num_children_in(self, tier: Tier) -> int:
        """How many of its children have blocks in a tier."""
        return self.num_cpu_children if tier else self.num_gpu_children

    def add_child(self, key: bytes, child: Run) -> None:
        """Hang a run below this one."""
        children = self.children
        if children is NO_CHILDREN:
            self.children = {key: child}
        else:
            self.children = put(cast("Children", children), key, child, crc32)

    def remove_child(self, key: bytes) -> None:
        """The reverse; of an earlier epoch it may hang there no more (see `Graves`)."""
        children = self.children
        if children is not NO_CHILDREN:
            cast("Children", children).pop(key, None)
            if not children:
                self.children = NO_CHILDREN

    def remove_leaf(self, key: bytes, tier: Tier) -> bool:
        """The same of one that is in this tier alone, in the present epoch. Whether no other is left there: there most
        often is one, and the children need not be counted."""
        cast("Children", self.children).pop(key, None)
        if tier:
            self.num_cpu_children -= 1
        else:
            self.num_gpu_children -= 1
        if self.num_gpu_children or self.num_cpu_children:
            return not (self.num_cpu_children if tier else self.num_gpu_children)
        if not self.children:
            self.children = NO_CHILDREN
        return True

    def take_children(self) -> Children:
        """Hang nothing below this run any more; returns what was there."""
        children, self.children = self.children, NO_CHILDREN
        return cast("Children", children)

    def add_tokens(self, keys: BlockKeys, start: int, end: int) -> None:
        """Add the bytes [start, end) of somebody's tokens at the end; all of them or, on `MemoryError`, none."""
        tokens, self.author = self.tokens, 0
        if end - start > _SHORT_BYTES:
            data, at = keys.buffer(start, end)
            tokens = bytearray(tokens) if type(tokens) is bytes else tokens
            tokens += memoryview(data)[at : at + end - start]
        elif tokens:  # each block of a decode step
            tokens = bytearray(tokens) if type(tokens) is bytes else tokens
            tokens += keys.part(start, end)
        else:
            tokens = keys.part(start, end)
        self.tokens = tokens

    # What a run has is taken apart, put together and cut in these four, and nowhere else.

    def front(self, num_blocks: int, block_bytes: int) -> Run:
        """A run beside this one with what its first blocks have; this one is as before, until `cut_front`."""
        upper = copy.copy(self)
        upper.children, upper.pins, upper.queued_gpu, upper.queued_cpu = NO_CHILDREN, (), None, None
        upper.checkpoint, upper.number = None, 0
        upper.num_gpu_children = upper.num_cpu_children = upper.num_held_children = upper.num_held = 0
        upper.num_blocks = num_blocks
        upper.tokens = self.tokens[: num_blocks * block_bytes]
        upper.hashes = self.hashes[: num_blocks * HASH_BYTES]
        upper.block_marks = self.block_marks[: num_blocks * MARK_BYTES]
        if self.extras is not None:
            upper.extras = {block: extra for block, extra in self.extras.items() if block < num_blocks} or None
        upper.gpu = self.gpu[: num_blocks * ID_BYTES]
        upper.cpu = self.cpu[: max(0, num_blocks - self.cpu_start) * ID_BYTES]
        if (sample := self.notes.sample) is not None:
            upper.notes = self.notes.with_sample(sample.front(num_blocks))
        if self.stored is not NOT_STORED:
            upper.stored = self.stored.front(num_blocks)
        return upper

    def cut_front(self, upper: Run, block_bytes: int) -> None:
        """Leave to `upper`, which `front` has made, what it has: all of it or, on `MemoryError`, nothing."""
        cut, extras = upper.num_blocks, self.extras
        if extras is not None:
            extras = {b - cut: extra for b, extra in extras.items() if b >= cut} or None
        tokens, hashes = self.tokens[cut * block_bytes :], self.hashes[cut * HASH_BYTES :]
        gpu, cpu = self.gpu[len(upper.gpu) :], self.cpu[len(upper.cpu) :]
        sample = self.notes.sample
        notes = self.notes.with_sample(sample.behind(cut)) if sample is not None else self.notes
        marks = self.block_marks[cut * MARK_BYTES :]
        stored = self.stored.behind(cut) if self.stored is not NOT_STORED else NOT_STORED
        self.tokens, self.hashes, self.extras, self.gpu, self.cpu = tokens, hashes, extras, gpu, cpu
        self.notes, self.block_marks, self.stored = notes, marks, stored
        self.num_blocks -= cut
        self.cpu_start = max(0, self.cpu_start - cut)
        if self.checkpoint is not None:
            part_chain(upper, self)

    def take_in(self, lower: Run) -> None:
        """The reverse: have what the run behind it has, too; all of it or, on `MemoryError`, nothing."""
        above, extras, hashes, marks = self.num_blocks, self.extras, self.hashes, self.block_marks
        tokens = bytearray(self.tokens) + lower.tokens
        gpu, cpu = as_kept(self.gpu + lower.gpu), as_kept(self.cpu + lower.cpu)
        if len(hashes) == above * HASH_BYTES:  # else the last of its own blocks have no names yet
            hashes = hashes + lower.hashes
        if len(marks) == above * MARK_BYTES:
            marks = marks + lower.block_marks
        if lower.extras is not None:
            extras = {**(extras or {}), **{b + above: x for b, x in lower.extras.items()}}
        stored = self.stored if self.stored is lower.stored is NOT_STORED else self.stored.joined(lower.stored, above)
        sample, notes = self.notes.sample, lower.notes
        if sample is not None and notes.sample is not None:  # see `EvictionPolicy.alike`
            sample = sample.joined(notes.sample)
        notes = notes.with_sample(sample)
        if not self.cpu:
            self.cpu_start = lower.cpu_start + above
        self.tokens, self.gpu, self.cpu, self.extras = tokens, gpu, cpu, extras
        self.hashes, self.block_marks = hashes, marks
        self.stored, self.notes, self.author = stored, notes, lower.author
        self._take_use(lower)
        self.num_blocks += lower.num_blocks
        if lower.checkpoint is not None:
            join_chain(self, lower, above)

    def _take_use(self, lower: Run) -> None:
        """Both were used as the run behind this one, but for the last use, which is the later one."""
        self.last_used, self.used_last = max(self.last_used, lower.last_used), max(self.used_last, lower.used_last)
        self.inserted, self.num_uses, self.is_shared = lower.inserted, lower.num_uses, lower.is_shared
        self.gpu_since, self.cpu_since = lower.gpu_since, lower.cpu_since

    def cut(self, num_blocks: int, block_bytes: int) -> None:
        """Keep its first blocks alone; no tier has those behind them any more. Needs no memory but for what is
        short."""
        tokens, size = self.tokens, num_blocks * block_bytes
        if type(tokens) is bytes:
            self.tokens = tokens[:size]
        else:
            del tokens[size:]  # type: ignore[union-attr]
        try:
            if self.hashes:
                self.hashes = self.hashes[: num_blocks * HASH_BYTES]
            if self.block_marks:
                self.block_marks = self.block_marks[: num_blocks * MARK_BYTES]
        except MemoryError:  # both are found anew where they are asked for
            self.hashes = self.block_marks = b""
        if self.extras is not None:
            for block in range(num_blocks, self.num_blocks):
                self.extras.pop(block, None)
            self.extras = self.extras or None
        if (sample := self.notes.sample) is not None:
            sample.cut(num_blocks)
        self.num_blocks = num_blocks
        if self.stored is not NOT_STORED:
            self.stored = self.stored.front(num_blocks)

    def cut_off(self) -> None:
        """Let go of all others, so that nothing refers to itself in a circle."""
        self.parent, self.children, self.pins, self.checkpoint = None, NO_CHILDREN, (), None

    def forget(self) -> None:
        """It hangs in the tree no more. A policy may hold it for a while, and needs nothing of what it had."""
        self.parent, self.tokens = None, b""
        if self.queued_gpu is not None:  # to look costs less than to set
            self.queued_gpu = None
        if self.queued_cpu is not None:
            self.queued_cpu = None
        if self.hashes:
            self.hashes = b""

    def root(self) -> Run:
        """That of its namespace."""
        run = self
        while run.parent is not None:
            run = run.parent
        return run

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


class Usage:
    """How a run was used, as one thing: fields of the run and of its notes, to read and to set."""

    __slots__ = ("_run",)

    def __init__(self, run: Run) -> None:
        object.__setattr__(self, "_run", run)

    def __getattr__(self, name: str) -> Any:
        run: Run = object.__getattribute__(self, "_run")
        return getattr(run.notes if name in PolicyNotes.__struct_fields__ else run, name)

    def __setattr__(self, name: str, value: float) -> None:
        run: Run = object.__getattribute__(self, "_run")
        if name in PolicyNotes.__struct_fields__:
            run.notes = run.notes.but(**{name: value})
        else:
            setattr(run, name, value)
