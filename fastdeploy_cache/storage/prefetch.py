"""A prompt's blocks on their way from storage, and how much may be on its way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.changes import Change
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.clock import Clock, Event
from fastdeploy_cache.transfer_manager.task import TransferResult

_CHUNK_BYTES, _MAX_CHUNK_BYTES = 32 * 2**20, 128 * 2**20  # of a task; the more the faster the store reads


@dataclass(frozen=True, kw_only=True)
class StorageLimits:
    """See the settings of `CacheConfig` with these names."""

    min_blocks: int
    max_blocks: int  # on their way from storage at a time
    max_writing_blocks: int
    chunk_blocks: int
    max_chunk_blocks: int

    @classmethod
    def of(cls, config: CacheConfig) -> StorageLimits:
        """The limits that follow from the size of the CPU pool."""
        num_cpu_blocks, block_bytes = config.pool_sizes()[1], config.block_bytes()
        chunk, max_chunk = (
            max(1, min(num_bytes // max(1, block_bytes), num_cpu_blocks // 4))
            for num_bytes in (_CHUNK_BYTES, _MAX_CHUNK_BYTES)
        )
        return cls(
            min_blocks=max(1, -(-config.min_prefetch_tokens // config.block_size)),
            max_blocks=max(1, int(num_cpu_blocks * config.max_prefetch_share)),
            max_writing_blocks=max(1, min(2 * chunk, num_cpu_blocks // 4)),
            chunk_blocks=chunk,
            max_chunk_blocks=max_chunk,
        )


class Holding(NamedTuple):
    """CPU blocks that tasks of storage own, and what prefetches keep of the tree."""

    block_ids: list[int]
    pins: list[Pin]
    checkpoints: list[Checkpoint]


@dataclass(eq=False, repr=False)
class StoragePrefetch:
    """Blocks [first, first + num_wanted) of a prompt on their way from storage to the CPU tier.

    ::

        first  |- num_landed -|- in flight -|          |
               |------- num_asked ----------|          |
               |------- num_present: what storage has -|- ... -| num_wanted

    They land from the first on, in pieces; what lands behind a gap does not count. Of a hybrid model storage is asked
    up to the deepest of the `stops` of which it has the checkpoint, whose image comes last: see `CheckpointReads`.
    """

    request_id: str
    namespace: str
    keys: BlockKeys
    first: int
    hashes: bytes
    epoch: int
    clock: Clock
    done: Event
    deadline: float  # until which somebody may wait for it
    priority: float | None = None
    stops: bytes = b""  # of a hybrid model: of each block whether a request may go on behind it, and by which image
    pin: Pin | None = None  # of what has come, until the checkpoint is there
    checkpoint: Checkpoint | None = None  # that has come, and is pinned
    lacks_image: bool = False  # no task has been given it yet
    has_checkpoint: bool = False  # it has come
    num_held: int = 0  # blocks that `pin` keeps for it
    num_lookups: int = 1
    num_tried: int = 0  # blocks up to the checkpoint that the last look-up has found
    is_short: bool = False  # that was not whole
    num_present: int = 0
    num_found: int = 0  # that storage said it has, also where they did not come
    lacks_room: bool = False  # for the blocks that no task has been given yet
    num_asked: int = 0
    num_landed: int = 0
    num_in_flight: int = 0  # tasks
    began_at: float = 0.0  # when storage was asked, by the monotonic clock
    read_seconds: float = 0.0  # that the slowest rank spent on the pieces that have come
    revoked: bool = False  # nobody wants what has not come yet
    on_done: list[Callable[[], None]] = field(default_factory=list)  # called without the lock
    is_followed: bool = False  # by a match, which holds what has come and loads it
    loads: list[Transfer] = field(default_factory=list)  # to the GPU, that the match waits for
    task_ids: set[int] = field(default_factory=set)

    @property
    def num_wanted(self) -> int:
        """Blocks that were asked for."""
        return len(self.hashes) // HASH_BYTES

    @property
    def has_more(self) -> bool:
        """Whether there are blocks in storage, or an image, that no task has been given yet."""
        return (self.num_asked < self.num_present or self.lacks_image) and not self.revoked

    @property
    def is_loading(self) -> bool:
        """Whether loads to the GPU are in flight for it: CPU blocks may become free when they end."""
        return any(not transfer.done.is_set() for transfer in self.loads)

    @property
    def seconds_left(self) -> float:
        """How long somebody may still wait for it; less than 0 where that is over."""
        return self.deadline - self.clock.now()

    @property
    def is_pending(self) -> bool:
        """Whether more may come in time."""
        return not self.done.is_set() and not self.revoked and self.seconds_left > 0


@dataclass(slots=True, eq=False, kw_only=True)
class Fetched(Change):
    """A piece of a prefetch that a match follows has joined the CPU tier."""

    prefetch: StoragePrefetch


@dataclass(slots=True, eq=False, kw_only=True)
class StorageTaskEnded(Change):
    """Every rank has answered a task of storage, so many `seconds` after it was decided on. Noted behind what it
    brought, so that matches grow first. `request_id`: of the request that it was for, where it was for one."""

    result: TransferResult
    seconds: float
    request_id: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class PrefetchEnded(Change):
    """Nothing more comes of a request's prefetch, so many `seconds` after storage was asked."""

    seconds: float
    request_id: str
    num_blocks: int  # that have come


@dataclass(slots=True, eq=False, kw_only=True)
class StorageWentIdle(Change):
    """Nothing is on its way to the store any more, or from it, and nothing is queued."""
