"""What a subscriber asks of a publisher beside vLLM's replay, and the answers. Wire format: msgpack maps.

Each question has a number that its answer repeats. A request of exactly eight bytes is vLLM's: the sequence from which
on messages are wanted again. No question here has so few.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.wire import BlockName
from fastdeploy_cache.ipc.codec import decode


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    number: int


class AskState(_Question, frozen=True, tag="state"):
    """Which lifetime of the publisher this is, and which sequence comes next."""


class AskSnapshot(_Question, frozen=True, tag="snapshot"):
    """Keep all that there is now, so that its pieces can be asked for."""


class AskPiece(_Question, frozen=True, tag="piece"):
    """One piece of a snapshot, from 0 on, each behind the one before. With its last piece a snapshot is over."""

    snapshot: int
    piece: int


class AskPrefix(_Question, frozen=True, tag="prefix"):
    """How much of a prompt is cached, by its tokens and its namespace, or by the names of its blocks."""

    token: str
    namespace: str | None = None
    token_ids: list[int] | None = None
    names: list[BlockName] | None = None


Question = AskState | AskSnapshot | AskPiece | AskPrefix


class _Answer(msgspec.Struct, frozen=True, kw_only=True):
    number: int


class PublisherState(_Answer, frozen=True, tag="state"):
    """A lifetime has an `epoch` of its own; `sequence` is that of the next message.

    `snapshot`: the number of the one that was asked for. It holds what all messages before `sequence` have told.
    `topic`: the first frame of its messages.
    `groups`: kind and window of each group of a hybrid model but the full one, by number.
    """

    epoch: int
    sequence: Annotated[int, msgspec.Meta(ge=0)]
    scheme: NameScheme
    heartbeat_seconds: Annotated[float, msgspec.Meta(ge=0.01, le=3600.0)]
    topic: str = ""
    groups: dict[int, tuple[str, int]] = {}
    snapshot: int | None = None


class SnapshotPiece(_Answer, frozen=True, tag="piece"):
    """`payload` is a batch, as in a message. `is_last`: no piece comes behind it."""

    snapshot: int
    piece: int
    payload: bytes
    is_last: bool


class PrefixAnswer(_Answer, frozen=True, tag="prefix"):
    """Leading tokens, and the part of them in each medium: the fastest one that a block is in counts."""

    num_tokens: int
    num_gpu_tokens: int
    num_cpu_tokens: int
    num_disk_tokens: int


class Refusal(_Answer, frozen=True, tag="refused"):
    """It cannot be answered, and why. It also ends a snapshot of which it was asked."""

    reason: str


Answer = PublisherState | SnapshotPiece | PrefixAnswer | Refusal


class _Numbered(msgspec.Struct):
    number: int


def number_in(data: bytes) -> int:
    """The number of something that is no question; 0 where it has none."""
    try:
        numbered: _Numbered = decode(data, _Numbered)
    except CodecError:
        return 0
    return numbered.number
