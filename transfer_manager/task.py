"""What the engine asks of the ranks and what they answer: in-process records and the messages on the wire.

Wire format: msgpack (see `fastdeploy_cache.ipc.codec`); block ids are packed little-endian int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np

from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


class Direction(Enum):
    """Which way blocks go, or what else is asked of a rank's storage process or peer process."""

    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    COPY = "copy"  # within the GPU
    LOOKUP = "lookup"  # how many leading blocks storage has
    PREFETCH = "prefetch"  # storage to CPU tier
    WRITE = "write"  # CPU tier to storage
    PROBE = "probe"  # blocks of noise there and back: whether the store works, and how fast it reads
    SEND = "send"  # GPU to a peer's GPU: ends when the peer has read all, or never will
    UPDATE_SEND = "update_send"  # more of a send is computed, or it has failed
    RECEIVE = "receive"  # a peer's GPU to ours
    END_RECEIVE = "end_receive"  # nobody wants a receive any more

    @property
    def lane(self) -> Lane:
        """Which of a rank's two threads does it: what requests wait for never queues behind copies down."""
        return Lane.OUT if self in _OUTWARD else Lane.IN


_OUTWARD = (Direction.SWAP_OUT, Direction.WRITE, Direction.SEND, Direction.UPDATE_SEND)
# Of use even where a rank is down: they end, or go on with, what the others are doing.
TO_WHO_IS_UP = (Direction.UPDATE_SEND, Direction.END_RECEIVE)
SWAPS = (Direction.SWAP_IN, Direction.SWAP_OUT, Direction.COPY)  # what a device does


class Lane(IntEnum):
    """A rank's threads, each with its own connection to the queue; tasks of one lane are done in order."""

    IN = 0
    OUT = 1


@dataclass(frozen=True, kw_only=True)
class TransferTask:
    """Copy block `source_ids[i]` to block `destination_ids[i]`, in all layers, on every rank.

    Which tiers the ids are of follows from `direction`. Of a COPY `num_tokens` may be given: so many leading tokens of
    each block are copied. A task of storage has the blocks' hashes, joined, in the order of the prompt, where the
    store asks for them the prompt's tokens up to there (int32, little-endian), and the ids of one tier only. What else
    a peer process has to know is in `detail` (`fastdeploy_cache.transfer_manager.peer.messages`).

    `deadline` is on the clock of `time.monotonic()`, which all processes of a machine share.
    """

    task_id: int
    direction: Direction
    source_ids: Int32Array
    destination_ids: Int32Array
    deadline: float
    num_tokens: int | None = None
    hashes: bytes = b""
    token_ids: bytes = b""
    priority: float | None = None
    detail: bytes = b""


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's part in a task: bytes moved in `seconds`, or why it failed.

    Attributes:
        num_blocks: of a task of storage, how many leading blocks it came to; of a probe, 0 if writing failed, else 1.
        was_tried: an error says something of what the rank works on; False for a task that was cancelled, late before
            it began, or in a process that died of another one.
        counts: what the store says of itself, see `StorageStats`.
        peer: of a send, the name of the instance that read it.
    """

    rank: int
    num_bytes: int = 0
    num_blocks: int = 0
    seconds: float = 0.0
    error: str | None = None
    was_tried: bool = True
    counts: dict[str, int] | None = None
    peer: str = ""


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """The end of a task: every rank has answered or has been reaped, so nobody writes its destinations any more."""

    task: TransferTask
    ranks: tuple[RankResult, ...]

    @property
    def error(self) -> str | None:
        """None when all ranks succeeded, else the first failure."""
        return next((f"rank {r.rank}: {r.error}" for r in self.ranks if r.error is not None), None)

    @property
    def is_failure(self) -> bool:
        """Whether a rank has tried, and failed."""
        return any(r.error is not None and r.was_tried for r in self.ranks)

    @property
    def num_blocks(self) -> int:
        """Leading blocks that a task of storage came to on all ranks."""
        return min((r.num_blocks for r in self.ranks), default=0)


class SwapMessage(msgspec.Struct, frozen=True, tag="swap"):
    """Engine to rank: one task."""

    task_id: int
    incarnation: int
    direction: Direction
    source_ids: bytes
    destination_ids: bytes
    deadline: float
    num_tokens: int | None = None
    hashes: bytes = b""
    token_ids: bytes = b""
    priority: float | None = None
    detail: bytes = b""

    @classmethod
    def of(cls, task: TransferTask, incarnation: int) -> SwapMessage:
        """The task for one incarnation of a rank."""
        return cls(
            task_id=task.task_id,
            incarnation=incarnation,
            direction=task.direction,
            source_ids=pack_ids(task.source_ids),
            destination_ids=pack_ids(task.destination_ids),
            deadline=task.deadline,
            num_tokens=task.num_tokens,
            hashes=task.hashes,
            token_ids=task.token_ids,
            priority=task.priority,
            detail=task.detail,
        )


class StopMessage(msgspec.Struct, frozen=True, tag="stop"):
    """Engine to rank: end now."""


class ReadyMessage(msgspec.Struct, frozen=True, tag="ready"):
    """Rank to engine: attached, this lane waits for tasks. `kv` where the rank itself has made the KV arrays."""

    incarnation: int
    lane: Lane
    kv: KVHandle | None = None
    needs_token_ids: bool = False  # of a store


class DoneMessage(msgspec.Struct, frozen=True, tag="done"):
    """Rank to engine: the answer to a task."""

    task_id: int
    incarnation: int
    num_bytes: int
    num_blocks: int
    seconds: float
    error: str | None
    was_tried: bool = True
    counts: dict[str, int] | None = None
    peer: str = ""


ToRank = SwapMessage | StopMessage
FromRank = ReadyMessage | DoneMessage


class ProcessSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a process reads from its standard input before anything else; descriptors are inherited."""

    rank: int
    incarnation: int
    engine_pid: int
    queue_address: str
    signal_fd: int
    heartbeat_seconds: float
    max_tasks_in_flight: int


class RankSetup(ProcessSetup, frozen=True, kw_only=True):
    """Of a rank's transfer process."""

    num_cpu_blocks: int
    cpu_fd: int
    device: str
    device_id: int
    layout: RankLayout
    num_gpu_blocks: int
    kv: KVHandle | None  # None: the rank makes the KV arrays


class StorageSetup(ProcessSetup, frozen=True, kw_only=True):
    """Of a rank's storage process."""

    num_cpu_blocks: int
    cpu_fd: int
    kind: str
    options: dict[str, Any]
    space: KeySpace
    import_paths: list[str]  # where the engine finds its modules; a store of its own is found there


class PeerSetup(ProcessSetup, frozen=True, kw_only=True):
    """Of a rank's peer process."""

    tp_size: int
    layout: RankLayout
    num_gpu_blocks: int
    kv: KVHandle
    instance_id: bytes
    name: str
    link: str
    link_options: dict[str, Any]
    address: str  # of its control socket
    keys_folder: str | None
    silence_seconds: float
    peer_signal_fd: int


def pack_ids(ids: Int32Array) -> bytes:
    """Block ids as they go on the wire."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """The ids in `data`, read-only."""
    return np.frombuffer(data, dtype="<i4")
