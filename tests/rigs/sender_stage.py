"""A sender without sockets, for its tests: what it puts, and short ways to talk to it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.ipc.codec import unpack_int32
from fastdeploy_cache.transfer_manager.peer.messages import (
    Chunk,
    Confirm,
    ReaderKey,
    SendDetail,
    SendKey,
    SendState,
    Subscribe,
    ToReader,
    Why,
)
from fastdeploy_cache.transfer_manager.peer.sender import SendEnd, Sender
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

OWNER, READER, OTHER = (bytes([n]) * 16 for n in (1, 2, 3))
NUM_LAYERS, SILENCE, DEADLINE = 4, 5.0, 100.0
OVER = Why("cancelled", "not needed")


def word(step: int, num_layers: int) -> int:
    return step << 12 | num_layers


class Stage:
    """A sender, what it has put, and short ways to talk to it. Offer 7 has four blocks; its task is number 70."""

    def __init__(self, *, has_rows: bool = False) -> None:
        self.sent: list[tuple[bytes, ToReader]] = []
        self.step_word = 0
        self.sender = Sender(
            OWNER, NUM_LAYERS, SILENCE, lambda to, message: self.sent.append((to, message)), lambda: self.step_word,
            has_rows=has_rows,
        )  # fmt: skip
        self.key = SendKey(OWNER, 7)

    def mark(self, step: int, num_layers: int) -> None:
        """The model's worker marks layers, and the rank's process wakes up for it."""
        self.step_word = word(step, num_layers)
        self.sender.tell_step()

    def reader(self, rank: int = 0, receive: int = 1, instance: bytes = READER) -> ReaderKey:
        return ReaderKey(instance, receive, rank)

    def _task(self, kind: TaskKind, ids: Sequence[int]) -> TransferTask:
        source_ids, none = np.array(ids, np.int32), np.empty(0, np.int32)
        return TransferTask(task_id=70, kind=kind, source_ids=source_ids, destination_ids=none, deadline=0.0)

    def begin(self, *ids: int, complete: int = 0, step: int | None = None, now: float = 0.0) -> None:
        detail = SendDetail(number=7, num_blocks=4, num_complete=complete, step=step)
        self.sender.begin(self._task(TaskKind.SEND, ids), detail, DEADLINE, now)

    def update(
        self,
        *ids: int,
        complete: int = 0,
        step: int | None = None,
        why: Why | None = None,
        units: bytes | None = None,
    ) -> None:
        detail = SendDetail(number=7, num_blocks=4, num_complete=complete, step=step, why=why, units=units)
        self.sender.update(self._task(TaskKind.UPDATE_SEND, ids), detail)

    def subscribe(
        self, reader: ReaderKey, known: int = 0, now: float = 0.0, readers: int = 1, to: bytes = b"c"
    ) -> None:
        self.sender.subscribe(to, Subscribe(self.key, reader, readers, known, "decode"), now)

    def confirm(self, reader: ReaderKey, num_bytes: int = 10, to: bytes = b"c") -> ToReader:
        """The answer."""
        self.heard()
        self.sender.confirm(to, Confirm(self.key, reader, num_bytes), 0.0)
        ((connection, answer),) = self.heard()
        assert connection == to
        return answer

    def heard(self) -> list[tuple[bytes, ToReader]]:
        """What was put since the last call."""
        sent, self.sent = self.sent, []
        return sent

    def state(self) -> SendState:
        """The only message since the last call."""
        ((_, message),) = self.heard()
        assert isinstance(message, SendState) and message.key == self.key
        return message

    def ends(self) -> list[SendEnd]:
        return self.sender.take_ended()


def said(state: SendState) -> tuple[int, list[int], int, tuple[Chunk, ...]]:
    assert state.why is None
    return state.first_id, unpack_int32(state.block_ids).tolist(), state.num_complete, state.chunks


def reason(message: ToReader) -> str:
    assert isinstance(message, SendState) and message.why is not None
    return message.why.reason
