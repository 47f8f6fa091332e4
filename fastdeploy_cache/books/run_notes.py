"""What is noted of a run beside its blocks: by policies, and of storage."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from fastdeploy_cache.books.block_sample import BlockSample

DEFAULT_PRIORITY = 35  # of a request that has none of its own, for the policy `priority`


class PolicyNotes(msgspec.Struct, gc=False, frozen=True):
    """What eviction policies note of a run, beside its uses. Each notes some of it."""

    priority: float = DEFAULT_PRIORITY  # that requests have asked for
    keep_until: float = 0.0  # in seconds; how long priority or pin is in force
    used_at: float = 0.0  # the last use, in the policy's own time
    turn: int = 1  # requests in a row that went on where the one before had ended
    gap: float = 0.0  # before the last of them
    reuse_class: int = 0
    sample: BlockSample | None = None  # of its blocks, those that are observed

    def but(self, **changes: float) -> PolicyNotes:
        """The same with these fields."""
        return replace(self, **changes)

    def with_sample(self, sample: BlockSample | None) -> PolicyNotes:
        """The same with these blocks."""
        return self if sample is self.sample else replace(self, sample=sample)


class Stored(msgspec.Struct, gc=False, frozen=True):
    """What storage has of a run, and was asked to take."""

    num_blocks: int = 0  # from the front, that it has taken; it may have dropped them since
    num_offered: int = 0  # from the front, that it was offered, in the use of that number
    offered_use: int = 1
    priority: float | None = None  # of the last request that used the run and had one

    def but(self, **changes: float | None) -> Stored:
        """The same with these fields."""
        return replace(self, **changes)

    def front(self, num_blocks: int) -> Stored:
        """That of the first blocks alone."""
        if self.num_blocks <= num_blocks and self.num_offered <= num_blocks:
            return self
        return self.but(num_blocks=min(self.num_blocks, num_blocks), num_offered=min(self.num_offered, num_blocks))

    def behind(self, num_blocks: int) -> Stored:
        """That of the others."""
        num_left, num_offered = max(0, self.num_blocks - num_blocks), max(0, self.num_offered - num_blocks)
        return self.but(num_blocks=num_left, num_offered=num_offered)

    def joined(self, lower: Stored, num_above: int) -> Stored:
        """That of a run of so many blocks and of the run behind it together."""
        num_blocks = self.num_blocks + (lower.num_blocks if self.num_blocks == num_above else 0)
        num_offered = self.num_offered + (lower.num_offered if self.num_offered == num_above else 0)
        return lower.but(num_blocks=num_blocks, num_offered=num_offered)


NO_NOTES, NOT_STORED = PolicyNotes(), Stored()  # of all runs of which nothing is known
