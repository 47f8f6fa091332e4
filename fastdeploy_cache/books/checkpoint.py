"""A checkpoint: what a request needs beside full KV to go on behind one block. Those of a run are a chain."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import msgspec

from fastdeploy_cache.books.run_notes import NO_NOTES, NOT_STORED, PolicyNotes, Stored


class ChainHolder(Protocol):
    """The run whose checkpoints are a chain: its deepest, which names the next one up, and so on."""

    num_blocks: int
    checkpoint: Checkpoint | None


class Checkpoint(msgspec.Struct, gc=False, eq=False):
    """The units of all rows that are read behind one boundary: what a window or a chunk has left, and states.

    It hangs at the run in which its boundary lies, and follows its block when the run is cut or joined. A list of them
    would be an object that the garbage collector looks at, and cutting it would need memory; a chain needs none. Only
    `Checkpoints` and the four methods of a run change one.

    Attributes:
        run: where it hangs; None once it is gone. A `Run`, whose module imports this one.
        end: its boundary, in blocks from the front of its run.
        boundary: the same in blocks from the root.
        above: the next one up in the same run.
        units: packed ids of its units on the GPU, row by row; None where they are not there. They may be none: at a
            boundary of chunks.
        pages: packed ids of the blocks of the CPU tier in which its image is; None where it has none there.
        num_pins: who keeps it where it is.
    """

    run: Any
    end: int
    boundary: int
    above: Checkpoint | None = None
    units: bytes | None = None
    pages: bytes | None = None
    num_pins: int = 0
    queued_gpu: object = None  # as of a run: a policy ranks it by the same fields
    queued_cpu: object = None
    last_used: int = 0
    inserted: int = 0
    num_uses: int = 0
    is_shared: bool = False
    notes: PolicyNotes = NO_NOTES
    stored: Stored = NOT_STORED  # whether storage has its image: one block of it, or none

    def __repr__(self) -> str:
        """Itself alone: what it refers to is the whole tree."""
        return f"Checkpoint({self.boundary} blocks)"

    @property
    def parent(self) -> object:
        """Whether it is still somewhere, as a policy asks of a run."""
        return self.run


def chain_of(run: ChainHolder) -> Iterator[Checkpoint]:
    """A run's checkpoints, the deepest first. The one that was given may go meanwhile."""
    checkpoint = run.checkpoint
    while checkpoint is not None:
        above = checkpoint.above
        yield checkpoint
        checkpoint = above


def deepest_within(run: ChainHolder, num_blocks: int) -> Checkpoint | None:
    """The last of a run's checkpoints whose boundary lies within its first blocks."""
    checkpoint = run.checkpoint
    while checkpoint is not None and checkpoint.end > num_blocks:
        checkpoint = checkpoint.above
    return checkpoint


def put_in(run: ChainHolder, checkpoint: Checkpoint) -> None:
    """Hang a checkpoint at its place; there is none at this boundary. Needs no memory."""
    below, above = None, run.checkpoint
    while above is not None and above.end > checkpoint.end:
        below, above = above, above.above
    checkpoint.above = above
    if below is None:
        run.checkpoint = checkpoint
    else:
        below.above = checkpoint


def take_out(run: ChainHolder, checkpoint: Checkpoint) -> None:
    """The reverse."""
    below, each = None, run.checkpoint
    while each is not checkpoint:
        assert each is not None, "a checkpoint hangs at another run"
        below, each = each, each.above
    if below is None:
        run.checkpoint = checkpoint.above
    else:
        below.above = checkpoint.above
    checkpoint.above, checkpoint.run = None, None


def part_chain(upper: ChainHolder, lower: ChainHolder) -> None:
    """A run was cut: each goes to the part in which its boundary lies. Needs no memory."""
    cut, below, checkpoint = upper.num_blocks, None, lower.checkpoint
    while checkpoint is not None and checkpoint.end > cut:
        checkpoint.end -= cut
        below, checkpoint = checkpoint, checkpoint.above
    if below is None:
        lower.checkpoint = None
    else:
        below.above = None
    upper.checkpoint = checkpoint
    while checkpoint is not None:
        checkpoint.run = upper
        checkpoint = checkpoint.above


def join_chain(upper: ChainHolder, lower: ChainHolder, num_above: int) -> None:
    """The reverse: what hung at the run behind hangs at the one above, which had so many blocks. Needs no memory."""
    checkpoint, last = lower.checkpoint, lower.checkpoint
    while checkpoint is not None:
        checkpoint.run, checkpoint.end, last = upper, checkpoint.end + num_above, checkpoint
        checkpoint = checkpoint.above
    if last is not None:
        last.above, upper.checkpoint, lower.checkpoint = upper.checkpoint, lower.checkpoint, None
