"""What the engine asks of the ranks and what they answer: in-process records and the messages on the wire.

Wire format: msgpack (see `ipc.codec`); block ids are packed little-endian int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import Any

import msgspec
import numpy as np

from transfer_manager.kv_memory import KVHandle
from transfer_manager.layout import RankLayout

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


class Direction(Enum):
    """Which way blocks go."""

    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    COPY = "copy"  # within the GPU

    @property
    def lane(self) -> Lane:
        """Which of a rank's two threads does it: what requests wait for never queues behind copies down."""
        return Lane.OUT if self is Direction.SWAP_OUT else Lane.IN


class Lane(IntEnum):
    """A rank's threads, each with its own connection to the queue; tasks of one lane are done in order."""

    IN = 0
    OUT = 1


@dataclass(frozen=True, kw_only=True)
class TransferTask:
    """Copy block `source_ids[i]` to block `destination_ids[i]`, in all layers, on every rank.

    Which tiers the ids are of follows from `direction`. Of a COPY `num_tokens` may be given: so many leading tokens of
    each block are copied.

    `deadline` is on the clock of `time.monotonic()`, which all processes of a machine share.
    """

    task_id: int
    direction: Direction
    source_ids: Int32Array
    destination_ids: Int32Array
    deadline: float
    num_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's part in a task: bytes moved in `seconds`, or why it failed."""

    rank: int
    num_bytes: int = 0
    seconds: float = 0.0
    error: str | None = None


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """The end of a task: every rank has answered or has been reaped, so nobody writes its destinations any more."""

    task: TransferTask
    ranks: tuple[RankResult, ...]

    @property
    def error(self) -> str | None:
        """None when all ranks succeeded, else the first failure."""
        return next((f"rank {r.rank}: {r.error}" for r in self.ranks if r.error is not None), None)


class SwapMessage(msgspec.Struct, frozen=True, tag="swap"):
    """Engine to rank: one task."""

    task_id: int
    incarnation: int
    direction: Direction
    source_ids: bytes
    destination_ids: bytes
    deadline: float
    num_tokens: int | None = None

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
        )


class StopMessage(msgspec.Struct, frozen=True, tag="stop"):
    """Engine to rank: end now."""


class ReadyMessage(msgspec.Struct, frozen=True, tag="ready"):
    """Rank to engine: attached, this lane waits for tasks. `kv` where the rank itself has made the KV arrays."""

    incarnation: int
    lane: Lane
    kv: KVHandle | None = None


class DoneMessage(msgspec.Struct, frozen=True, tag="done"):
    """Rank to engine: the answer to a task."""

    task_id: int
    incarnation: int
    num_bytes: int
    seconds: float
    error: str | None


ToRank = SwapMessage | StopMessage
FromRank = ReadyMessage | DoneMessage


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reads from its standard input before anything else; descriptors are inherited."""

    rank: int
    incarnation: int
    engine_pid: int
    queue_address: str
    device: str
    device_id: int
    layout: RankLayout
    num_gpu_blocks: int
    num_cpu_blocks: int
    kv: KVHandle | None  # None: the rank makes the KV arrays
    cpu_fd: int
    signal_fd: int
    heartbeat_seconds: float
    max_tasks_in_flight: int


def pack_ids(ids: Int32Array) -> bytes:
    """Block ids as they go on the wire."""
    return np.asarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> Int32Array:
    """The ids in `data`, read-only."""
    return np.frombuffer(data, dtype="<i4")
