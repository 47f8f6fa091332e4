"""Which blocks of a run a policy observes: they follow their run when it is cut or joined."""

from __future__ import annotations

from bisect import bisect_left

import msgspec


class BlockSample(msgspec.Struct, gc=False, eq=False):
    """The observed ones of the first `num_blocks` blocks of a run. What is behind them has not been looked at."""

    keys: list[int]  # of the observed blocks, first to last; 64 bits each
    blocks: list[int]  # their places in the run
    num_blocks: int
    end: int | None  # from what the blocks behind are computed; None where it is not known (any more)

    def num_before(self, block: int) -> int:
        """How many observed blocks lie before a place in the run, or in what continues it."""
        return bisect_left(self.blocks, block)

    def num_from(self, first_block: int) -> int:
        """How many observed blocks lie at `first_block` or behind."""
        return len(self.keys) - self.num_before(first_block)

    def cut(self, num_blocks: int) -> None:
        """Forget what is behind the first `num_blocks` blocks."""
        if num_blocks < self.num_blocks:
            num_keys = self.num_before(num_blocks)
            del self.keys[num_keys:], self.blocks[num_keys:]
            self.num_blocks, self.end = num_blocks, None

    def front(self, num_blocks: int) -> BlockSample:
        """That of the first blocks alone."""
        front = BlockSample(self.keys[:], self.blocks[:], self.num_blocks, self.end)
        front.cut(num_blocks)
        return front

    def behind(self, num_blocks: int) -> BlockSample | None:
        """That of the blocks behind the first `num_blocks`, if one of them has been looked at."""
        if num_blocks >= self.num_blocks:
            return None
        first = self.num_before(num_blocks)
        blocks = [block - num_blocks for block in self.blocks[first:]]
        return BlockSample(self.keys[first:], blocks, self.num_blocks - num_blocks, self.end)

    def joined(self, lower: BlockSample) -> BlockSample:
        """That of a run, all of whose blocks have been looked at, and of the run behind it together."""
        num_above = self.num_blocks
        blocks = self.blocks + [block + num_above for block in lower.blocks]
        return BlockSample(self.keys + lower.keys, blocks, num_above + lower.num_blocks, lower.end)
