"""Two instances with real peer processes: one computes and offers blocks, the other one reads them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from fastdeploy_cache.transfer_manager.peer.client import PeerProcesses
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.messages import Detail, EndReceiveDetail, ReceiveDetail, SendDetail, Why
from fastdeploy_cache.transfer_manager.peer.offer import InstanceInfo
from fastdeploy_cache.transfer_manager.task import Lane, TaskKind, TransferResult, TransferTask

SECONDS = 30.0
NUM_BLOCKS, BLOCK_SIZE, NUM_LAYERS = 24, 4, 3
LAYOUT = KVLayout(num_layers=NUM_LAYERS, num_kv_heads=4, head_dim=8, dtype="float16")
STALE, UNTOUCHED = 0xAA, 0x55  # bytes of what is not computed yet, and of what nothing was read into
Views = list[dict[str, np.ndarray[Any, np.dtype[Any]]]]
NOTHING: Sequence[int] = ()


def ids(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.int32]]:
    return np.array([*values], np.int32)


def look(condition: Callable[[], object], pause_seconds: float = 0.005) -> None:
    """Wait for what announces itself to nobody: bytes that another process writes."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come to hold"
        time.sleep(pause_seconds)


class Instance:
    """KV arrays of each rank, their peer processes, and every answer that these give."""

    def __init__(self, tp_size: int, layout: KVLayout, num_blocks: int, transfer: dict[str, Any], **peer: Any) -> None:
        self.tp_size, self.layout, self.num_blocks = tp_size, layout, num_blocks
        rank_layout = layout.for_rank(tp_size, BLOCK_SIZE)
        self.kv = [KVMemory.create(rank_layout, num_blocks) for _ in range(tp_size)]
        self.client = PeerProcesses(
            PeerConfig(**{"weights_id": "w", "name": "tests"} | peer),
            TransferConfig(**{"tp_size": tp_size} | transfer),
            instance_id=(instance_id := os.urandom(16)),
            layout=rank_layout,
            num_gpu_blocks=num_blocks,
            kv=[memory.handle() for memory in self.kv],
        )
        self._changed = threading.Condition()
        self._results: dict[int, list[TransferResult]] = {}
        self._next_number = 1
        self.client.start(self._note)
        assert self.client.wait_ready(SECONDS)
        self.info = InstanceInfo(
            instance_id=instance_id,
            name="tests",
            link=peer.get("link", "shm"),
            weights_id="w",
            block_size=BLOCK_SIZE,
            tp_size=tp_size,
            layout=layout,
            addresses=self.client.addresses,
            public_key=self.client.public_key,
        )

    def _note(self, result: TransferResult) -> None:
        with self._changed:
            self._results[result.task.task_id].append(result)
            self._changed.notify_all()

    # -- tasks

    def number(self) -> int:
        """One that was never used: of an offer, a receive or a task."""
        number, self._next_number = self._next_number, self._next_number + 1
        return number

    def submit(self, kind: TaskKind, block_ids: Iterable[int], detail: Detail, seconds: float = SECONDS) -> int:
        """Returns the task's id."""
        task_id, is_send = self.number(), kind.lane is Lane.OUT
        with self._changed:
            self._results[task_id] = []
        self.client.submit(
            TransferTask(
                task_id=task_id,
                kind=kind,
                source_ids=ids(block_ids if is_send else NOTHING),
                destination_ids=ids(NOTHING if is_send else block_ids),
                deadline=time.monotonic() + seconds,
                detail=detail.to_bytes(),
            )
        )
        return task_id

    def wait(self, task_id: int, seconds: float = SECONDS) -> TransferResult:
        """The task's answer."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._results[task_id], seconds), "no answer came"
            return self._results[task_id][0]

    def error(self, task_id: int) -> str:
        """Of a task that is to come to nothing."""
        error = self.wait(task_id).error
        assert error is not None
        return error

    def is_answered(self, task_id: int) -> bool:
        return bool(self._results[task_id])

    # -- processes

    def pid(self, rank: int = 0) -> int:
        pid = self.client.statuses()[rank].pid
        assert pid is not None
        return pid

    def wait_new(self, pid: int, rank: int = 0) -> None:
        """Wait until another process is in the place of this one, and all are ready."""
        look(lambda: self.client.statuses()[rank].pid not in (pid, None))
        assert self.client.wait_ready(SECONDS)

    def views(self, rank: int) -> Views:
        return self.kv[rank].views()

    def close(self) -> None:
        """Every task has got exactly one answer then."""
        self.client.stop()
        for memory in self.kv:
            memory.close()
        for task_id, results in self._results.items():
            assert len(results) == 1, f"task {task_id} has {len(results)} answers"
        self.client.__dict__.clear()  # pytest may hold it when leaks are looked for


class Pair:
    """An owner of blocks and a reader. What the model would compute is `content`; blocks hold it once computed."""

    def __init__(
        self,
        owner_ranks: int,
        reader_ranks: int,
        *,
        owner_layout: KVLayout = LAYOUT,
        reader_layout: KVLayout | None = None,
        num_blocks: int = NUM_BLOCKS,
        owner: dict[str, Any] | None = None,
        reader: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        **peer: Any,
    ) -> None:
        """`peer` settings are of both, `owner` and `reader` of one."""
        whole = owner_layout.for_rank(1, BLOCK_SIZE)
        memory = np.random.default_rng(7).integers(0, 256, whole.gpu_bytes(num_blocks), np.uint8)
        self.content = whole.kv_views([memory], whole.places(num_blocks))
        self.num_blocks, self.num_layers = num_blocks, whole.num_layers
        sides = []
        try:
            for ranks, layout, own in (
                (owner_ranks, owner_layout, owner),
                (reader_ranks, reader_layout or owner_layout, reader),
            ):
                sides.append(Instance(ranks, layout, num_blocks, transfer or {}, **peer, **(own or {})))
        except BaseException:
            for side in sides:
                side.close()
            raise
        self.owner, self.reader = sides
        self.source = self.owner.info  # for receives; a relay has other addresses
        self.destinations: set[int] = set()  # the reader's blocks that something may be read into
        self.wipe()

    def wipe(self) -> None:
        """As new: nothing is computed, nothing is read. Between transfers."""
        self.destinations.clear()
        for side, fill in ((self.owner, STALE), (self.reader, UNTOUCHED)):
            for memory in side.kv:
                for segment in memory.flat():
                    segment[:] = fill

    # -- the owner's verbs

    def compute(self, blocks: Iterable[int], layers: Iterable[int] | None = None) -> None:
        """Write what these blocks hold in these layers, on all ranks."""
        blocks = [*blocks]
        for rank in range(self.owner.tp_size):
            views = self.owner.views(rank)
            for layer in range(self.num_layers) if layers is None else layers:
                for name, view in views[layer].items():
                    view[blocks] = self._cut(self.owner, rank, self.content[layer][name])[blocks]

    def overwrite(self, blocks: Iterable[int]) -> None:
        """They are another request's now."""
        for rank in range(self.owner.tp_size):
            for in_layer in self.owner.views(rank):
                for view in in_layer.values():
                    view[[*blocks]] = 0

    def mark(self, step: int, num_layers: int) -> None:
        """What the model's workers do behind each layer."""
        for rank in range(self.owner.tp_size):
            self.owner.client.step_progress(rank).mark(step, num_layers)

    def send(
        self,
        blocks: Iterable[int],
        num_blocks: int,
        num_complete: int,
        step: int | None = None,
        seconds: float = SECONDS,
    ) -> tuple[int, int]:
        """Returns the offer's number and the task's id. All ranks know of it on return."""
        number = self.owner.number()
        detail = SendDetail(number=number, num_blocks=num_blocks, num_complete=num_complete, step=step)
        task = self.owner.submit(TaskKind.SEND, blocks, detail, seconds)
        self.owner.wait(self.update(number, num_blocks, num_complete))  # answered at once, in the tasks' order
        return number, task

    def offer(self, blocks: Sequence[int], seconds: float = SECONDS) -> tuple[int, int]:
        """Of blocks that are all computed."""
        self.compute(blocks)
        return self.send(blocks, len(blocks), len(blocks), seconds=seconds)

    def update(
        self, number: int, num_blocks: int, num_complete: int, blocks: Iterable[int] = NOTHING, step: int | None = None
    ) -> int:
        detail = SendDetail(number=number, num_blocks=num_blocks, num_complete=num_complete, step=step)
        return self.owner.submit(TaskKind.UPDATE_SEND, blocks, detail)

    def fail(self, number: int, why: Why, num_blocks: int = 1) -> int:
        detail = SendDetail(number=number, num_blocks=num_blocks, num_complete=0, why=why)
        return self.owner.submit(TaskKind.UPDATE_SEND, NOTHING, detail)

    # -- the reader's

    def receive(
        self,
        number: int,
        blocks: Iterable[int],
        num_blocks: int,
        *,
        first: int = 0,
        receive_number: int | None = None,
        slot: int = 0,
        seconds: float = SECONDS,
    ) -> int:
        """Returns the task's id, which is the receive's number, too, unless it is given."""
        blocks = [*blocks]
        self.destinations.update(blocks)
        detail = ReceiveDetail(
            source=self.source,
            number=number,
            first_block=first,
            num_blocks=num_blocks,
            receive_number=self.reader._next_number if receive_number is None else receive_number,
            slot=slot,
        )
        return self.reader.submit(TaskKind.RECEIVE, blocks, detail, seconds)

    def end_receive(self, receive_number: int) -> int:
        return self.reader.submit(TaskKind.END_RECEIVE, NOTHING, EndReceiveDetail(receive_number=receive_number))

    def holds(self, blocks: Sequence[int], sources: Sequence[int], layers: Iterable[int]) -> bool:
        """Whether the reader's blocks have the content of the owner's in these layers, on all ranks."""
        return all(
            np.array_equal(
                _bits(view[[*blocks]]), _bits(self._cut(self.reader, rank, self.content[layer][name])[[*sources]])
            )
            for rank in range(self.reader.tp_size)
            for layer in layers
            for name, view in self.reader.views(rank)[layer].items()
        )

    def are_untouched(self, blocks: Sequence[int], layers: Iterable[int]) -> bool:
        """Whether nothing was ever read into these."""
        return all(
            (_bits(view[[*blocks]]) == UNTOUCHED).all()
            for rank in range(self.reader.tp_size)
            for layer in layers
            for view in self.reader.views(rank)[layer].values()
        )

    def look(self, receive: int, blocks: Sequence[int], sources: Sequence[int], layers: Sequence[int]) -> None:
        """Wait until a receive that goes on has brought these layers of these blocks."""

        def are_here() -> bool:
            assert not self.reader.is_answered(receive), self.reader.wait(receive).error
            return self.holds(blocks, sources, layers)

        look(are_here)

    def check(self, blocks: Sequence[int], sources: Sequence[int]) -> None:
        """The blocks have arrived, byte for byte; and what nothing was ever to be read into is untouched."""
        layers = range(self.num_layers)
        assert self.holds(blocks, sources, layers)
        assert self.are_untouched([b for b in range(self.num_blocks) if b not in self.destinations], layers)

    def transfer(self, sources: Sequence[int], blocks: Sequence[int]) -> None:
        """Offer, receive, compare: all is well between the two."""
        number, send = self.offer(sources)
        receive = self.receive(number, blocks, len(sources))
        assert self.reader.wait(receive).error is None
        assert self.owner.wait(send).error is None
        self.check(blocks, sources)

    def _cut(self, side: Instance, rank: int, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """A rank's heads of the whole model's."""
        heads = side.layout.num_kv_heads
        first, num = rank * heads // side.tp_size, max(1, heads // side.tp_size)
        return array[:, first : first + num] if side.layout.heads_first else array[:, :, first : first + num]

    def close(self) -> None:
        try:
            self.reader.close()
        finally:
            self.owner.close()


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.ascontiguousarray(array).view(np.uint8)


@contextmanager
def pair_of(owner_ranks: int = 1, reader_ranks: int = 1, **settings: Any) -> Iterator[Pair]:
    """A pair that is closed in the end."""
    pair = Pair(owner_ranks, reader_ranks, **settings)
    try:
        yield pair
    finally:
        pair.close()
