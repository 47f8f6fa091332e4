"""Peer processes of several instances whose reads and answers happen when the test says so, over simulated memory."""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from dataclasses import dataclass, field

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.ipc.codec import decode, unpack_int32
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.peer.messages import EndReceiveDetail, ReceiveDetail, SendDetail
from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TaskKind, TransferResult, TransferTask


@dataclass(eq=False)
class SimSend:
    """As its rank knows it."""

    owner: SimulatedPeers
    task: TransferTask
    num_blocks: int
    ids: list[int] = field(default_factory=list)
    num_complete: int = 0
    units: bytes | None = None  # of a hybrid model's checkpoint behind all blocks
    why: str | None = None  # told to fail, or asked for by nobody: to be answered
    is_over: bool = False  # answered, or about to be: readers get no more `Confirmed`

    @property
    def is_final(self) -> bool:
        """All of it is computed."""
        is_whole = self.num_complete == self.num_blocks == len(self.ids)
        return is_whole and (self.units is not None or not self.owner.rows)


@dataclass(eq=False)
class SimReceive:
    """Blocks by their number in the offer, as far as they have been read."""

    owner: SimulatedPeers
    task: TransferTask
    detail: ReceiveDetail
    read: dict[int, object] = field(default_factory=dict)
    units_read: bytes | None = None  # the owner's, of which all has been read
    is_cancelled: bool = False

    @property
    def missing(self) -> list[int]:
        """Blocks still to be read."""
        return [b for b in range(self.detail.first_block, self.detail.num_blocks) if b not in self.read]

    @property
    def is_read(self) -> bool:
        """All that it wants."""
        return not self.missing and (self.detail.units is None or self.units_read is not None)

    @property
    def send(self) -> SimSend | None:
        """What it reads, if that is still open."""
        source = next((end for end in self.owner.network if end.name == self.detail.source.name), None)
        return source.sends.get(self.detail.number) if source is not None else None


class SimulatedPeers:
    """See `transfer_manager.peer.client.PeerClient`; `memory[i]` is the content of GPU block i, and `rows[n][i]` that
    of unit i of the row n behind the full one."""

    addresses = ("simulated",)
    public_key = b""

    def __init__(self, name: str, network: list[SimulatedPeers], memory: MutableSequence[object]) -> None:
        self.name, self.network, self.memory = name, network, memory
        self.rows: Sequence[MutableSequence[object]] = ()
        self.num_units: Callable[[int], Sequence[int]] = lambda _: ()  # by row, of a checkpoint behind so many blocks
        self.sends: dict[int, SimSend] = {}  # by offer
        self.receives: list[SimReceive] = []
        self.up = True
        self._on_result: OnResult | None = None
        network.append(self)

    def start(self, on_result: OnResult, on_failing: Callable[[TransferTask], None]) -> None:
        self._on_result = on_result

    def submit(self, task: TransferTask) -> None:
        if not self.up:
            self.answer(task, "a rank is down", was_tried=False)
        elif task.kind.lane is Lane.OUT:
            self._send(task, decode(task.detail, SendDetail))
        elif task.kind is TaskKind.RECEIVE:
            self.receives.append(SimReceive(self, task, decode(task.detail, ReceiveDetail)))
        else:
            detail: EndReceiveDetail = decode(task.detail, EndReceiveDetail)
            for receive in self.receives:
                receive.is_cancelled |= receive.detail.receive_number == detail.receive_number
            self.answer(task)

    def _send(self, task: TransferTask, detail: SendDetail) -> None:
        if task.kind is TaskKind.SEND:
            self.sends[detail.number] = SimSend(self, task, detail.num_blocks)
        send = self.sends.get(detail.number)
        if send is not None:
            send.ids += task.source_ids.tolist()
            send.num_complete = max(send.num_complete, detail.num_complete)
            send.units = detail.units if detail.units is not None else send.units
            send.why = f"{detail.why.reason}: {detail.why.text}" if detail.why is not None else send.why
        if task.kind is TaskKind.UPDATE_SEND:
            self.answer(task)

    # -- what the test lets happen

    def read(self, receive: SimReceive, num_blocks: int) -> None:
        """Copy blocks that are complete; of a send that is over, whatever is there now."""
        send = receive.send
        for block in receive.missing[:num_blocks]:
            if send is None or block >= send.num_complete:
                return
            content = send.owner.memory[send.ids[block]]
            receive.read[block] = content
            self.memory[int(receive.task.destination_ids[block - receive.detail.first_block])] = content
        if send is not None and send.units is not None and receive.detail.units is not None and not receive.missing:
            receive.units_read = send.units
            theirs = self._places(send.owner, send.units, send.num_blocks)
            for (row, unit), (other, source) in zip(self._units_of(receive), theirs, strict=True):
                row[unit] = other[source]

    def _units_of(self, receive: SimReceive) -> list[tuple[MutableSequence[object], int]]:
        return self._places(self, receive.detail.units or b"", receive.detail.num_blocks)

    @staticmethod
    def _places(end: SimulatedPeers, units: bytes, num_blocks: int) -> list[tuple[MutableSequence[object], int]]:
        """The row and number of each of these units."""
        if not units:
            return []
        rows = [row for row, count in zip(end.rows, end.num_units(num_blocks), strict=True) for _ in range(count)]
        return list(zip(rows, unpack_int32(units).tolist(), strict=True))

    def confirm(self, receive: SimReceive) -> bool:
        """The end of a receive that has read all: well if its blocks were held. Whether there was an end."""
        send = receive.send
        wants_nothing = receive.detail.wants_nothing
        if not wants_nothing and (not receive.is_read or send is None or not send.is_final):
            return False
        if send is not None and not send.is_over and send.why is None:
            send.is_over = True
            self._end(receive, None)
        else:
            self._end(receive, None if wants_nothing else "gone: it was over")
        return True

    def fail(self, receive: SimReceive, error: str) -> None:
        """It comes to nothing; where it was writing there is garbage."""
        for block_id in receive.task.destination_ids.tolist():
            self.memory[block_id] = "garbage"
        for row, unit in self._units_of(receive):
            row[unit] = "garbage"
        self._end(receive, error)

    def _end(self, receive: SimReceive, error: str | None) -> None:
        self.receives.remove(receive)
        self.answer(receive.task, error)

    def end_send(self, send: SimSend, error: str | None) -> None:
        """Its task is answered: from now on its blocks may be anybody's."""
        number = next(n for n, each in self.sends.items() if each is send)
        del self.sends[number]
        self.answer(send.task, error)

    def answer(self, task: TransferTask, error: str | None = None, *, was_tried: bool = True) -> None:
        """A task has ended."""
        assert self._on_result is not None
        rank = RankResult(rank=0, error=error, was_tried=was_tried)
        self._on_result(TransferResult(task=task, ranks=(rank,)))

    # -- the rest of a client

    def attach_kv(self, rank: int, kv: KVHandle) -> None:
        pass

    def kv_lost(self, rank: int) -> None:
        pass

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        return self.up

    @property
    def available(self) -> bool:
        return self.up

    def wait_ready(self, timeout_seconds: float) -> bool:
        return self.up

    def statuses(self) -> list[RankStatus]:
        return []

    def step_progress(self, rank: int) -> StepProgress:
        raise LayoutError(f"rank {rank} has no words")

    def num_layers_in_flight(self, slot: int) -> int:
        return 0

    def stop(self) -> None:
        self.up = False
        for receive in list(self.receives):
            self.fail(receive, "gone: stopped")
        for send in list(self.sends.values()):
            self.end_send(send, "gone: stopped")
