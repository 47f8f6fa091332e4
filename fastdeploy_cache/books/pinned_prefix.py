"""A prefix that an adapter's caller keeps where it is."""

from __future__ import annotations

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin


class PinnedPrefix:
    """The first `num_blocks` blocks of a sequence stay where they are until `unpin`; those on the GPU are `block_ids`.

    A reset forgets them, and leaves them in place. Where there are rows, `checkpoint` is the deepest within them: it
    stays, too, or nobody could use them.
    """

    __slots__ = ("_pin", "block_ids", "checkpoint", "num_blocks")

    def __init__(self, pin: Pin | None, num_blocks: int, block_ids: list[int]) -> None:
        self._pin = pin
        self.num_blocks = num_blocks
        self.block_ids = block_ids
        self.checkpoint: Checkpoint | None = None

    @property
    def pin(self) -> Pin | None:
        """Where it ends; None once it has been unpinned, and of no blocks."""
        return self._pin

    @property
    def num_checkpoint_blocks(self) -> int | None:
        """The boundary of its checkpoint; None where it has none: without one nobody can go on in it."""
        return self.checkpoint.boundary if self.checkpoint is not None else None

    def cut(self, pin: Pin | None, num_blocks: int) -> None:
        """What is behind `num_blocks` has gone."""
        self._pin, self.num_blocks = pin, num_blocks

    def end(self) -> Pin | None:
        """The pin, once: it keeps nothing any more."""
        pin, self._pin, self.num_blocks = self._pin, None, 0
        return pin
