"""A prompt's blocks on their way from storage, and how much may be on its way."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from fastdeploy_cache.block_hash import HASH_BYTES
from fastdeploy_cache.prefix_tree import BlockKeys

_CHUNK_BYTES = 32 * 2**20  # of a task: small enough that loads to the GPU follow soon, large enough for a disk


@dataclass(frozen=True, kw_only=True)
class StorageLimits:
    """See the settings of `CacheConfig` with these names."""

    task_timeout_seconds: float
    min_blocks: int
    max_blocks: int  # on their way from storage at a time
    max_writing_blocks: int
    chunk_blocks: int

    @classmethod
    def of(
        cls, num_cpu_blocks: int, block_bytes: int, *, min_blocks: int, max_share: float, task_timeout_seconds: float
    ) -> StorageLimits:
        """By the size of the CPU pool."""
        chunk = max(1, min(_CHUNK_BYTES // max(1, block_bytes), num_cpu_blocks // 4))
        return cls(
            task_timeout_seconds=task_timeout_seconds,
            min_blocks=max(1, min_blocks),
            max_blocks=int(num_cpu_blocks * max_share),
            max_writing_blocks=max(1, min(2 * chunk, num_cpu_blocks // 4)),
            chunk_blocks=chunk,
        )


@dataclass(eq=False)
class StoragePrefetch:
    """Blocks [first, first + num_wanted) of a prompt on their way from storage to the CPU tier.

    They land from the first on, in pieces; what lands behind a gap does not count.
    """

    namespace: str
    keys: BlockKeys
    first: int
    hashes: bytes
    epoch: int
    deadline: float  # until which somebody may wait for it
    num_landed: int = 0
    num_in_flight: int = 0  # tasks
    revoked: bool = False  # nobody wants what has not come yet
    done: threading.Event = field(default_factory=threading.Event)
    on_done: list[Callable[[], None]] = field(default_factory=list)  # called without the manager's lock
    on_landed: Callable[[], None] | None = None  # called under it, when more has joined the CPU tier
    task_ids: set[int] = field(default_factory=set)

    @property
    def num_wanted(self) -> int:
        """Blocks that were asked for."""
        return len(self.hashes) // HASH_BYTES

    def is_pending(self, now: float) -> bool:
        """Whether more may come in time."""
        return not self.done.is_set() and not self.revoked and now < self.deadline
