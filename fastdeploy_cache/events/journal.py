"""What an engine tells its publisher of its tree, in this order. Wire format: msgpack arrays.

Runs are told by numbers, which rise and are never used twice. A change of shape is told as it happens; what a run has
is told as it is when the record is made, and not how it came to that. So between a change of shape and the next record
of a run, the publisher may know fewer blocks of it than it has, or others at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import Any

import msgspec

from fastdeploy_cache.ipc.codec import decode


class RecordTag(IntEnum):
    """The first entry of a record."""

    BEGAN = 0
    CLEARED = 1
    RUN = 2
    GONE = 3
    PARTED = 4
    JOINED = 5
    STORE = 6
    STORE_GONE = 7


class Began(msgspec.Struct, array_like=True, tag=int(RecordTag.BEGAN)):
    """What was told before counts no more: something of it was lost. All that there is will be told."""


class TreeCleared(msgspec.Struct, array_like=True, tag=int(RecordTag.CLEARED)):
    """All that was told so far has been forgotten."""


class RunTold(msgspec.Struct, array_like=True, tag=int(RecordTag.RUN)):
    """A run as it is.

    Attributes:
        parent: the run above it; 0: it begins prompts of `namespace`.
        num_blocks: how many it has; `tokens` are those of its blocks from `first` on.
        extras: of these, by block of the run.
        num_gpu: how many of its first blocks are on the GPU; [cpu_start, cpu_start + num_cpu) are in the CPU tier.
        anchors: of each of its checkpoints the place in the run, the blocks from the root, and the tiers as bits.
    """

    number: int
    parent: int
    namespace: str
    num_blocks: int
    first: int
    tokens: bytes
    extras: dict[int, bytes] | None
    num_gpu: int
    cpu_start: int
    num_cpu: int
    anchors: list[tuple[int, int, int]]


class RunGone(msgspec.Struct, array_like=True, tag=int(RecordTag.GONE)):
    """A run has gone with all that it had, and with all below it."""

    number: int


class RunParted(msgspec.Struct, array_like=True, tag=int(RecordTag.PARTED)):
    """The first blocks of a run are a run of their own now, above it."""

    upper: int
    lower: int
    num_blocks: int


class RunsJoined(msgspec.Struct, array_like=True, tag=int(RecordTag.JOINED)):
    """A run, which had so many blocks, has taken in its only child."""

    upper: int
    lower: int
    num_above: int


class StoreTold(msgspec.Struct, array_like=True, tag=int(RecordTag.STORE)):
    """What one of `num_ranks` says of its store; see `StoreNews`."""

    rank: int
    num_ranks: int
    opened_ns: int
    number: int
    came: bytes
    gone: bytes


class StoreGone(msgspec.Struct, array_like=True, tag=int(RecordTag.STORE_GONE)):
    """No store is attached any more."""


Record = Began | TreeCleared | RunTold | RunGone | RunParted | RunsJoined | StoreTold | StoreGone
Note = tuple[Any, ...]  # a record as it is noted, which is packed later


class Delivery(msgspec.Struct, array_like=True):
    """Records in a row. Where a number is left out, some are lost, and what follows counts from the next `Began` on."""

    number: int
    records: list[Record]


def encode_notes(number: int, notes: Sequence[Note]) -> bytes:
    """A `Delivery`, of records as they were noted."""
    return msgspec.msgpack.encode((number, notes))


def decode_delivery(data: bytes) -> Delivery:
    """The delivery in a message. Raises `CodecError`."""
    return decode(data, Delivery)
