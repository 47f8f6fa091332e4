"""What the engine asks of the ranks and what they answer. How it is said on the wire: `process.wire`."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple, Self

from fastdeploy_cache.ipc.codec import Int32Array

LEFT_OUT = -1  # in place of a unit that a load is not to fill


class Lane(IntEnum):
    """A rank's threads, each with its own connection to the queue; tasks of one lane are done in order.

    What requests wait for never queues behind copies down: those go OUT, with all that only reads our blocks.
    """

    IN = 0
    OUT = 1


class _Traits(NamedTuple):
    lane: Lane
    is_swap: bool = False
    shows_layers: bool = False
    needs_all_ranks: bool = True
    outlives_engine: bool = False


class TaskKind(Enum):
    """What is asked of a process of each rank: which way blocks go, or what else there is to do.

    Attributes:
        lane: which of the process's two lanes the task goes by.
        is_swap: a device moves blocks between or within the tiers of this machine's memory.
        shows_layers: each rank shows in shared memory, layer by layer, how far the task is.
        needs_all_ranks: it begins only while every rank is up. One that does not ends, or goes on with, what ranks are
            doing, so it is of use to those that are up.
        outlives_engine: what has been asked is still done when the engine stops, as its effect lasts.
    """

    lane: Lane
    is_swap: bool
    shows_layers: bool
    needs_all_ranks: bool
    outlives_engine: bool

    SWAP_IN = "swap_in", _Traits(Lane.IN, is_swap=True, shows_layers=True)  # CPU tier to GPU
    SWAP_OUT = "swap_out", _Traits(Lane.OUT, is_swap=True)  # GPU to CPU tier
    COPY = "copy", _Traits(Lane.IN, is_swap=True)  # within the GPU
    LOOKUP = "lookup", _Traits(Lane.IN)  # how many leading blocks storage has
    PREFETCH = "prefetch", _Traits(Lane.IN)  # storage to CPU tier
    WRITE = "write", _Traits(Lane.OUT, outlives_engine=True)  # CPU tier to storage
    CLEAR = "clear", _Traits(Lane.OUT)  # forget what storage has of these weights
    PROBE = "probe", _Traits(Lane.IN)  # blocks of noise there and back: whether the store works, how fast it reads
    SEND = "send", _Traits(Lane.OUT)  # GPU to a peer's GPU: ends when the peer has read all, or never will
    UPDATE_SEND = "update_send", _Traits(Lane.OUT, needs_all_ranks=False)  # more is computed, or the send has failed
    RECEIVE = "receive", _Traits(Lane.IN)  # a peer's GPU to ours
    END_RECEIVE = "end_receive", _Traits(Lane.IN, needs_all_ranks=False)  # nobody wants a receive any more
    PUBLISH = "publish", _Traits(Lane.OUT)  # tell others what has come to the cache and gone
    WIPE = "wipe", _Traits(Lane.OUT)  # overwrite blocks of both tiers with zeros
    FORGET = "forget", _Traits(Lane.OUT, outlives_engine=True)  # remove what storage has of a namespace

    def __new__(cls, value: str, traits: _Traits) -> Self:
        kind = object.__new__(cls)
        kind._value_ = value  # what is said on the wire, in metrics and in logs
        for name, trait in traits._asdict().items():
            setattr(kind, name, trait)
        return kind


class StoreNews(NamedTuple):
    """What has come to a rank's store and gone, as whoever listens is told: names of objects, joined.

    Attributes:
        opened_ns: when the process began; a later one tells all anew.
        number: from 0 on; answers overtake each other.
        has_more: there is more to be told now.
    """

    listener: int
    opened_ns: int
    number: int
    came: bytes
    gone: bytes
    has_more: bool


@dataclass(frozen=True, kw_only=True)
class TransferTask:
    """Copy block `source_ids[i]` to block `destination_ids[i]`, in all layers of the full row, on every rank.

    Which tiers the ids are of follows from `kind`. Of a COPY `num_tokens` may be given: so many leading tokens of
    each block are copied; and a `row` behind the full one: the ids are units of that one. A WIPE copies nothing: its
    sources are blocks of the CPU tier, and its destinations are blocks of the GPU, or units of a `row`.

    A swap with `units` moves a checkpoint: these are its units by row behind the full one, the ids of the CPU tier are
    its pages, and there are none of the GPU. A load does not fill those that are `LEFT_OUT`. It goes in steps, between
    which the rank does other tasks of its lane.

    A task of storage has the blocks' hashes, joined, in the order of the prompt, where the
    store asks for them the prompt's tokens up to there (int32, little-endian), and the ids of one tier only. A LOOKUP
    for a checkpoint has in `detail` a byte for each block: see `NO_STOP` in `storage.keys`. A WRITE may have there the
    hashes of the blocks before. What else
    a peer process has to know is in `detail`, too (`fastdeploy_cache.transfer_manager.peer.messages`). `owner` says
    whose blocks these are: see `storage.keys.owner_mark`. `listener` is who is to be told what the store has, and 0
    nobody; a higher number than before is told all.

    `deadline` is on the clock of `SYSTEM_CLOCK.now()`, which all processes of a machine share.
    """

    task_id: int
    kind: TaskKind
    source_ids: Int32Array
    destination_ids: Int32Array
    deadline: float
    num_tokens: int | None = None
    hashes: bytes = b""
    token_ids: bytes = b""
    priority: float | None = None
    detail: bytes = b""
    units: tuple[Int32Array, ...] = ()
    row: int = 0
    owner: bytes = b""
    listener: int = 0


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """One rank's part in a task: bytes moved in `seconds`, or why it failed.

    Attributes:
        num_blocks: of a task of storage, how many leading blocks it came to; of a probe, 0 if writing failed, else 1.
        was_tried: an error says something of what the rank works on; False for a task that was cancelled, late before
            it began, or in a process that died of another one.
        counts: what the store says of itself, see `StorageStats`.
        peer: of a send, the name of the instance that read it.
        news: of a task of storage that has a listener.
    """

    rank: int
    num_bytes: int = 0
    num_blocks: int = 0
    seconds: float = 0.0
    error: str | None = None
    was_tried: bool = True
    counts: dict[str, int] | None = None
    peer: str = ""
    news: StoreNews | None = None


@dataclass(frozen=True, kw_only=True)
class TransferResult:
    """The end of a task: every rank has answered or has been reaped, so nobody writes its destinations any more."""

    task: TransferTask
    ranks: tuple[RankResult, ...]

    @property
    def error(self) -> str | None:
        """The first failure, or None when all ranks have succeeded."""
        return next((f"rank {r.rank}: {r.error}" for r in self.ranks if r.error is not None), None)

    @property
    def is_failure(self) -> bool:
        """Whether a rank has tried, and failed."""
        return any(r.error is not None and r.was_tried for r in self.ranks)

    @property
    def num_blocks(self) -> int:
        """Leading blocks that a task of storage came to on all ranks."""
        return min((r.num_blocks for r in self.ranks), default=0)
