"""What an engine tells its publisher: a record for each change of the tree, in their order. Wire format: msgpack.

Runs are told by numbers, which rise and are never used twice. Whoever applies all records from a `Began` on has the
tree: which blocks each run has in which tier. An interval that comes once more, or goes once more, changes nothing.
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
    WHOLE = 2
    CAME = 3
    LEFT = 4
    GONE = 5
    PARTED = 6
    JOINED = 7
    ANCHORED = 8
    LIFTED = 9


class Began(msgspec.Struct, array_like=True, tag=int(RecordTag.BEGAN)):
    """What was told before counts no more: something of it was lost. All that there is will be told."""


class TreeCleared(msgspec.Struct, array_like=True, tag=int(RecordTag.CLEARED)):
    """All that was told so far has been forgotten."""


class WholeRun(msgspec.Struct, array_like=True, tag=int(RecordTag.WHOLE)):
    """A run as it is: its tokens, behind which other it comes (0: it begins prompts of a namespace), what is where."""

    number: int
    tokens: bytes
    num_blocks: int
    parent: int
    namespace: str
    extras: dict[int, bytes] | None
    num_gpu: int
    cpu_start: int
    num_cpu: int


class Came(msgspec.Struct, array_like=True, tag=int(RecordTag.CAME)):
    """Blocks of a run have come to a tier; the tokens are those of these blocks, `extras` counts from the first one."""

    number: int
    tokens: bytes
    num_blocks: int
    first: int
    tier: int
    extras: dict[int, bytes] | None


class BlocksLeft(msgspec.Struct, array_like=True, tag=int(RecordTag.LEFT)):
    """Blocks of a run have left a tier."""

    number: int
    tier: int
    first: int
    num_blocks: int


class RunGone(msgspec.Struct, array_like=True, tag=int(RecordTag.GONE)):
    """A run has gone with all that it had."""

    number: int


class RunParted(msgspec.Struct, array_like=True, tag=int(RecordTag.PARTED)):
    """The first blocks of a run are a run of their own now, above it."""

    upper: int
    lower: int
    num_blocks: int


class RunsJoined(msgspec.Struct, array_like=True, tag=int(RecordTag.JOINED)):
    """A run has taken in its only child."""

    upper: int
    lower: int


class AnchorCame(msgspec.Struct, array_like=True, tag=int(RecordTag.ANCHORED)):
    """A checkpoint behind the first `end` blocks of a run, `boundary` blocks from the root, has come to a tier."""

    number: int
    end: int
    boundary: int
    tier: int


class AnchorLeft(msgspec.Struct, array_like=True, tag=int(RecordTag.LIFTED)):
    """It has left the tier."""

    number: int
    end: int
    boundary: int
    tier: int


Record = (
    Began | TreeCleared | WholeRun | Came | BlocksLeft | RunGone | RunParted | RunsJoined | AnchorCame | AnchorLeft
)  # fmt: skip
Note = tuple[Any, ...]  # a record as it is noted, which is packed later


def encode_notes(notes: Sequence[Note]) -> bytes:
    """Records in a row, as one message."""
    return msgspec.msgpack.encode(notes)


def decode_records(data: bytes) -> list[Record]:
    """The records of such a message. Raises `CodecError`."""
    return decode(data, list[Record])
