"""The offers of one rank: what is computed of each, who reads it, and when it is over. No sockets, no threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from fastdeploy_cache.ipc.codec import pack_int32
from fastdeploy_cache.transfer_manager.peer.messages import (
    Chunk,
    Confirm,
    Confirmed,
    Leave,
    ReaderKey,
    SendDetail,
    SendKey,
    SendState,
    Subscribe,
    ToReader,
    Why,
)
from fastdeploy_cache.transfer_manager.peer.peer_signal import layers_done
from fastdeploy_cache.transfer_manager.task import TransferTask

_MAX_REMEMBERED = 4096
_MAX_EARLY = 1024

K = TypeVar("K")
V = TypeVar("V")
Put = Callable[[bytes, ToReader], None]  # to the connection of that name; may be lost


@dataclass(frozen=True)
class SendEnd:
    """A send is over, for this rank: well unless there is a `why`."""

    task_id: int
    num_bytes: int
    num_blocks: int
    why: Why | None
    peer: str  # who was to read it, as far as it is known


@dataclass
class _Reader:
    connection: bytes
    num_told: int  # block ids
    heard_at: float
    told: tuple[int, tuple[Chunk, ...], bool] | None = None
    has_confirmed: bool = False


@dataclass
class _Send:
    task_id: int
    num_blocks: int
    deadline: float
    has_rows: bool
    ids: list[int] = field(default_factory=list)
    num_complete: int = 0
    units: bytes | None = None
    steps: list[tuple[int, int]] = field(default_factory=list)  # end block and step of what is being computed
    receiver: tuple[bytes, int] | None = None  # instance and number of the receive that it is bound to
    readers: dict[int, _Reader] = field(default_factory=dict)  # by rank
    num_readers: int = 0
    num_bytes: int = 0
    peer: str = ""

    @property
    def is_final(self) -> bool:
        is_whole = self.num_complete == self.num_blocks == len(self.ids)
        return is_whole and (self.units is not None or not self.has_rows)


class Sender:
    """Sends by number. A reader's `Confirm` is answered only while the blocks are held, that is before the send's task
    has been answered: what a reader has read after that never counts."""

    def __init__(
        self,
        instance_id: bytes,
        num_layers: int,
        silence_seconds: float,
        put: Put,
        read_step: Callable[[], int],
        *,
        has_rows: bool = False,
    ) -> None:
        """`read_step` gives the step's word as it is now. It is read whenever something is said of it. `has_rows`: of a
        hybrid model, each offer ends with a checkpoint.

        One that was read before could be older than the engine's message: the model marks a layer, and the engine ends
        the request, both after that look and before the message was taken. The failure then named layer 0.
        """
        self._instance_id, self._num_layers, self._silence_seconds = instance_id, num_layers, silence_seconds
        self._put, self._read_step, self._has_rows = put, read_step, has_rows
        self._sends: dict[int, _Send] = {}
        self._confirmed: OrderedDict[tuple[SendKey, ReaderKey], None] = OrderedDict()
        self._failed: OrderedDict[int, Why] = OrderedDict()  # why sends came to nothing
        self._early: OrderedDict[tuple[int, ReaderKey], tuple[bytes, Subscribe]] = OrderedDict()
        self._left: OrderedDict[tuple[int, ReaderKey], Leave] = OrderedDict()  # before they were begun
        self._last_number = 0
        self._told_step = read_step()
        self._ended: list[SendEnd] = []

    @property
    def has_sends(self) -> bool:
        """Whether any is open."""
        return bool(self._sends)

    def take_ended(self) -> list[SendEnd]:
        """What has ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    # -- from the engine

    def begin(self, task: TransferTask, detail: SendDetail, deadline: float, now: float) -> None:
        """SEND, which ends at that time of `time.monotonic` at the latest. Numbers rise."""
        number = self._last_number = detail.number
        self._sends[number] = _Send(task.task_id, detail.num_blocks, deadline, self._has_rows)
        self._extend(number, task, detail)
        for key in [key for key in self._early if key[0] <= number]:
            self.subscribe(*self._early.pop(key), now)
        for key in [key for key in self._left if key[0] <= number]:
            self.leave(self._left.pop(key))

    def update(self, task: TransferTask, detail: SendDetail) -> None:
        """UPDATE_SEND; of a send that is over it says nothing new."""
        if detail.number in self._sends:
            self._extend(detail.number, task, detail)

    def _extend(self, number: int, task: TransferTask, detail: SendDetail) -> None:
        send = self._sends[number]
        send.ids += task.source_ids.tolist()
        send.num_complete, send.units = detail.num_complete, detail.units
        send.steps = [(end, step) for end, step in send.steps if end > send.num_complete]
        known = send.steps[-1][0] if send.steps else send.num_complete
        if detail.step is not None and len(send.ids) > known:
            send.steps.append((len(send.ids), detail.step))
        if detail.why is not None:
            self._end(number, Why(detail.why.reason, f"{detail.why.text}{self._place(send)}"))
        else:
            self._tell(number, send)

    def _place(self, send: _Send) -> str:
        """How far it had come, within the blocks that were being computed."""
        if not send.steps:
            return ""
        num_layers = layers_done(self._read_step(), send.steps[0][1])
        return f", at layer {num_layers} of {self._num_layers} of the next"

    def tell_step(self) -> None:
        """Say to readers which layers the model's worker has marked since the last call."""
        if (word := self._read_step()) == self._told_step:
            return
        self._told_step = word
        for number, send in self._sends.items():
            if send.steps:
                self._tell(number, send)

    # -- from readers

    def subscribe(self, connection: bytes, message: Subscribe, now: float) -> None:
        """A reader is there, new or again."""
        key, reader = message.key, message.reader
        send = self._sends.get(key.number)
        if key.instance_id == self._instance_id and key.number > self._last_number:
            # The engine hands an offer out when its task is on the way here: a reader may be faster.
            _keep(self._early, (key.number, reader), (connection, message), _MAX_EARLY)
            return
        if key.instance_id != self._instance_id or send is None:
            failed = self._failed.get(key.number) if key.instance_id == self._instance_id else None
            why = failed or Why("gone", f"offer {key.number} is over, or of another run of the instance")
            self._put(connection, SendState(key, reader, why=why))
            return
        receiver = (reader.instance_id, reader.number)
        if send.receiver != receiver:
            # of an instance that was started again, or whose `Leave` was lost; the old one's `Confirm` finds itself
            # unbound
            send.receiver, send.readers = receiver, {}
        send.num_readers, send.peer = message.num_readers, message.name
        known = min(message.num_known, len(send.ids))
        mine = send.readers.setdefault(reader.rank, _Reader(connection, known, now))
        mine.connection, mine.num_told, mine.heard_at, mine.told = connection, known, now, None
        self._tell(key.number, send)

    def confirm(self, connection: bytes, message: Confirm, now: float) -> None:
        """A reader has read it all."""
        key, reader = message.key, message.reader
        if (key, reader) in self._confirmed:  # the answer was lost
            self._put(connection, Confirmed(key, reader))
            return
        send = self._sends.get(key.number) if key.instance_id == self._instance_id else None
        mine = send.readers.get(reader.rank) if send is not None else None
        if send is None or mine is None or send.receiver != (reader.instance_id, reader.number) or not send.is_final:
            why = Why("gone", f"offer {key.number} was over before its blocks were read")
            self._put(connection, SendState(key, reader, why=why))
            return
        mine.has_confirmed, mine.heard_at = True, now
        send.num_bytes += message.num_bytes
        _keep(self._confirmed, (key, reader), None, _MAX_REMEMBERED)
        self._put(connection, Confirmed(key, reader))
        if len(send.readers) == send.num_readers and all(each.has_confirmed for each in send.readers.values()):
            self._end(key.number, None)

    def leave(self, message: Leave) -> None:
        """A reader does not want it (any more): with it the send ends, on this rank."""
        key, reader = message.key, message.reader
        is_mine = key.instance_id == self._instance_id
        if is_mine and key.number > self._last_number:  # faster than the offer's task, as a `Subscribe` may be
            self._early.pop((key.number, reader), None)
            _keep(self._left, (key.number, reader), message, _MAX_EARLY)
        send = self._sends.get(key.number) if is_mine else None
        if send is not None and send.receiver in (None, (reader.instance_id, reader.number)):
            send.peer = send.peer or message.name
            self._end(key.number, message.why)

    # -- time

    def tick(self, now: float) -> None:
        """End what is late, and what has lost a reader."""
        for number, send in list(self._sends.items()):
            silent = [r for r, each in send.readers.items() if self._is_silent(each, now)]
            if now > send.deadline:
                who = "read to the end" if send.readers else "asked for"
                self._end(number, Why("late", f"offer {number} was not {who} in time"))
            elif silent:
                self._end(number, Why("gone", f"rank {silent[0]} of the receiver of offer {number} has gone silent"))

    def stop(self) -> None:
        """The instance ends: readers need not wait for it to go silent."""
        for number in list(self._sends):
            self._end(number, Why("gone", "the instance has been stopped"))

    def _is_silent(self, reader: _Reader, now: float) -> bool:
        return not reader.has_confirmed and now - reader.heard_at > self._silence_seconds

    def _end(self, number: int, why: Why | None) -> None:
        send = self._sends.pop(number)
        if why is not None:
            _keep(self._failed, number, why, _MAX_REMEMBERED)
            for rank, reader in send.readers.items():
                self._put(reader.connection, SendState(self._key(number), self._name(send, rank), why=why))
        num_blocks = 0 if why is not None else send.num_blocks
        self._ended.append(SendEnd(send.task_id, send.num_bytes, num_blocks, why, send.peer))

    def _tell(self, number: int, send: _Send) -> None:
        """Say to each reader what it does not know."""
        word = self._read_step() if send.steps else 0
        chunks = tuple(Chunk(end, layers_done(word, step)) for end, step in send.steps)
        now = (send.num_complete, chunks, send.units is not None)
        for rank, reader in send.readers.items():
            if reader.told == now and reader.num_told == len(send.ids):
                continue
            new = np.asarray(send.ids[reader.num_told :], np.int32)
            self._put(
                reader.connection,
                SendState(
                    self._key(number),
                    self._name(send, rank),
                    reader.num_told,
                    pack_int32(new),
                    send.num_complete,
                    chunks,
                    units=send.units,
                    num_blocks=send.num_blocks,
                ),
            )
            reader.told, reader.num_told = now, len(send.ids)

    def _key(self, number: int) -> SendKey:
        return SendKey(self._instance_id, number)

    @staticmethod
    def _name(send: _Send, rank: int) -> ReaderKey:
        assert send.receiver is not None
        return ReaderKey(*send.receiver, rank)


def _keep(kept: OrderedDict[K, V], key: K, value: V, most: int) -> None:
    """Keep one more, and so many at the most: the oldest one goes."""
    kept[key] = value
    if len(kept) > most:
        kept.popitem(last=False)
