"""What the engine asks of the ranks and what they answer: in-process records and the messages on the wire.

Wire format: msgpack (see `ipc.codec`); block ids are packed little-endian int32.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import msgspec
import numpy as np

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


class Direction(Enum):
    """Which way blocks go."""

    SWAP_IN = "swap_in"
    SWAP_OUT = "swap_out"
    COPY = "copy"  # within the GPU


@dataclass(frozen=True, kw_only=True)
class TransferTask:
    """Copy block `source_ids[i]` to block `destination_ids[i]`, in all layers, on every rank.

    Which tiers the ids are of follows from `direction`.

    `deadline` is on the clock of `time.monotonic()`, which all processes of a machine share.
    """

    task_id: int
    direction: Direction
    source_ids: Int32Array
    destination_ids: Int32Array
    deadline: float


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


class StopMessage(msgspec.Struct, frozen=True, tag="stop"):
    """Engine to rank: end now."""


class ReadyMessage(msgspec.Struct, frozen=True, tag="ready"):
    """Rank to engine: attached, waiting for tasks."""

    incarnation: int


class DoneMessage(msgspec.Struct, frozen=True, tag="done"):
    """Rank to engine: the answer to a task."""

    task_id: int
    incarnation: int
    num_bytes: int
    seconds: float
    error: str | None


ToRank = SwapMessage | StopMessage
FromRank = ReadyMessage | DoneMessage


class PartSetup(msgspec.Struct, frozen=True):
    """A `KVPart` on the wire."""

    name: str
    shape: tuple[int, ...]
    dtype: str


class RankSetup(msgspec.Struct, frozen=True, kw_only=True):
    """What a rank reads from its standard input before anything else; descriptors are inherited."""

    rank: int
    incarnation: int
    engine_pid: int
    queue_address: str
    device: str
    device_id: int
    num_layers: int
    parts: tuple[PartSetup, ...]
    num_gpu_blocks: int
    num_cpu_blocks: int
    kv_fd: int
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
