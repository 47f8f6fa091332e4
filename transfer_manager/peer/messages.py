"""What is said between the peer processes of two instances, and what an engine tells its own.

Wire format: msgpack (see `fastdeploy_cache.ipc.codec`); block ids are packed little-endian int32. Each message says
all that it is about, so one that is lost or comes twice does no harm: readers ask again, and states are absolute::

    reader                                   owner of the blocks
    Hello        ->  <- Welcome              once: where the memory is
    Subscribe    ->  <- SendState            again and again: more blocks, more layers, or an error
    (reads the bytes over the link, layer by layer)
    Confirm      ->  <- Confirmed            the blocks were held until now: they count
    Leave        ->                          it wants them no more
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple, get_args

import msgspec

from fastdeploy_cache.ipc.codec import encode
from fastdeploy_cache.transfer_manager.kv.layout import Places
from fastdeploy_cache.transfer_manager.peer.offer import ID_BYTES, InstanceInfo

Reason = Literal["gone", "late", "refused", "failed", "cancelled", "full"]
REASONS: tuple[str, ...] = get_args(Reason)
_Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class Why(msgspec.Struct, frozen=True):
    """Why a transfer came to nothing."""

    reason: Reason
    text: str


class SendKey(msgspec.Struct, frozen=True):
    """Names one offer of one run of one instance."""

    instance_id: _Id
    number: _Count


class ReaderKey(msgspec.Struct, frozen=True):
    """Names one receive of one run of one instance, and which of its ranks reads."""

    instance_id: _Id
    number: _Count
    rank: _Count


# -- between instances


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """Reader: who are you?"""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """Owner: this incarnation of that instance's rank, with its KV arrays at `places` behind the link's `endpoint`."""

    instance_id: _Id
    rank: _Count
    endpoint: bytes
    places: Places


class Subscribe(msgspec.Struct, frozen=True, tag="subscribe"):
    """Reader: tell me of this offer, whose first `num_known` block ids I have. One of `num_readers` of this rank."""

    key: SendKey
    reader: ReaderKey
    num_readers: _Count
    num_known: _Count
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of its instance


class Chunk(NamedTuple):
    """Blocks up to `end` that a step is computing: their first `num_layers` layers are there."""

    end: int
    num_layers: int


class SendState(msgspec.Struct, frozen=True, tag="state"):
    """Owner: how far an offer is. `block_ids` are those from `first_id` on; the first `num_complete` blocks have all
    layers, `chunks` follow in order. `units`, of a hybrid model, are those of the checkpoint behind all
    `num_blocks` blocks, row by row, once it is there. With `why` it has come to nothing."""

    key: SendKey
    reader: ReaderKey
    first_id: _Count = 0
    block_ids: bytes = b""
    num_complete: _Count = 0
    chunks: tuple[Chunk, ...] = ()
    why: Why | None = None
    units: bytes | None = None
    num_blocks: _Count = 0


class Confirm(msgspec.Struct, frozen=True, tag="confirm"):
    """Reader: I have read everything, so many bytes. Were the blocks held all the time?"""

    key: SendKey
    reader: ReaderKey
    num_bytes: Annotated[int, msgspec.Meta(ge=0, lt=2**62)]


class Confirmed(msgspec.Struct, frozen=True, tag="confirmed"):
    """Owner: they were."""

    key: SendKey
    reader: ReaderKey


class Leave(msgspec.Struct, frozen=True, tag="leave"):
    """Reader: this offer is not needed (any more). With `why` of an error, else the reader has it all already."""

    key: SendKey
    reader: ReaderKey
    why: Why | None = None
    name: Annotated[str, msgspec.Meta(max_length=64)] = ""  # of its instance


ToOwner = Hello | Subscribe | Confirm | Leave
ToReader = Welcome | SendState | Confirmed


# -- from an engine to its own peer processes: `detail` of tasks


class Detail(msgspec.Struct, frozen=True, kw_only=True):
    """What a task says beside its block ids."""

    def to_bytes(self) -> bytes:
        """The bytes for `TransferTask.detail`."""
        return encode(self)


class SendDetail(Detail, frozen=True, kw_only=True):
    """What SEND and UPDATE_SEND say; the task's `source_ids` are blocks behind those told before.

    `num_complete` of the blocks have all layers; with `step`, the blocks behind these are computed by the step of that
    number. `units` are those of the checkpoint behind all blocks, row by row, once it is there. With `why` the send is
    over.
    """

    number: int
    num_blocks: int  # of the offer
    num_complete: int
    step: int | None = None
    units: bytes | None = None
    why: Why | None = None


class ReceiveDetail(Detail, frozen=True, kw_only=True):
    """What RECEIVE says; the task's `destination_ids` are for the offer's blocks from `first_block` on, and `units`, of
    a hybrid model, for the checkpoint behind them, row by row; None where it is not wanted.

    `slot`: of `PeerSignal`, for layers in flight. With nothing of it wanted the offer is left.
    """

    source: InstanceInfo
    number: int
    first_block: int
    num_blocks: int  # of the offer
    receive_number: int
    slot: int
    units: bytes | None = None

    @property
    def wants_nothing(self) -> bool:
        """Whether all of the offer is here already."""
        return self.first_block == self.num_blocks and self.units is None


class EndReceiveDetail(Detail, frozen=True, kw_only=True):
    """What END_RECEIVE says."""

    receive_number: int
