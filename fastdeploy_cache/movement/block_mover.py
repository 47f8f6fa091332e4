"""Copies between tiers: reserve, send, then give what came to whom it belongs. All of it under the lock."""

from __future__ import annotations

import dataclasses
import functools
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Change
from fastdeploy_cache.books.path import Part
from fastdeploy_cache.books.run import CPU, GPU, Pin, Run, Tier
from fastdeploy_cache.books.transfer import Cargo, Segment, Transfer
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.cargo import CallersBlocks, Landings, OneBlock, WipedBlocks
from fastdeploy_cache.movement.outbox import InFlight, Outbox
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient

logger = event_log(__name__)


@dataclass(slots=True, eq=False, kw_only=True)
class TaskEnded(Change):
    """Every rank has answered a task that moves blocks on the GPU or between the tiers, so many `seconds` after it was
    decided on."""

    result: TransferResult
    seconds: float
    num_lost: int  # of a copy down: blocks that joined nothing


def as_int32(ids: array[int]) -> Int32Array:
    """The very memory, as a task has it."""
    return np.frombuffer(ids, np.int32)


class BlockMover:
    """Starts loads (CPU to GPU), stores (GPU to CPU) and copies within the GPU, and ends them.

    The destination ids belong to the task until every rank has answered; the source is pinned as long.
    """

    def __init__(self, books: Books, client: TransferClient, task_timeout_seconds: float) -> None:
        self._books, self._tree = books, books.tree
        self._client = client
        self._timeout_seconds, self._clock = task_timeout_seconds, books.clock
        self._next_task_id = 1
        self.tasks = InFlight(books.clock)
        self._outbox = Outbox(client, self.on_result, books.mishaps, self.tasks)
        books.add_outlet(self._outbox)
        self.in_flight: dict[int, Transfer] = {}
        self.is_quiet = False  # nothing is to be started
        self._ranks_without_kv: set[int] = set()  # whose workers have not attached their KV arrays (again)
        self.num_storing = 0  # blocks on their way to the CPU tier
        self.num_landed = [0, 0]  # by destination: blocks that joined it since the start
        # tasks that a full queue kept from starting
        self.num_refused = {kind: 0 for kind in TaskKind if kind.is_swap}

    def can(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        """Whether so many tasks can be started now; a full queue means "not now", and is counted."""
        if self.is_quiet or self._ranks_without_kv:
            return False
        client, mishaps = self._client, self._books.mishaps
        num_tasks += self._outbox.num_queued(kind.lane)  # of this turn: the client does not know of them yet
        if num_tasks == 1:
            has_room = mishaps.ask("client", lambda: client.has_room(kind), otherwise=False)
        else:
            has_room = mishaps.ask("client", lambda: client.has_room(kind, num_tasks), otherwise=False)
        if has_room:
            return True
        if kind.is_swap:
            self.num_refused[kind] += mishaps.ask("client", lambda: client.available, otherwise=False)
        return False

    @property
    def is_up(self) -> bool:
        """Whether every rank is there and has its KV arrays."""
        client = self._client
        return not self._ranks_without_kv and self._books.mishaps.ask(
            "client", lambda: client.available, otherwise=False
        )

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing from now on, or go on."""
        self.is_quiet = quiet

    def note_kv(self, rank: int, *, is_there: bool) -> None:
        """A rank's worker has attached its KV arrays, or has lost them: without all of them nothing is started."""
        (self._ranks_without_kv.discard if is_there else self._ranks_without_kv.add)(rank)

    def load(self, parts: Sequence[Part]) -> None:
        """Start copying blocks that are in the CPU tier only; there are as many that the GPU has room for."""
        self._start(GPU, parts)

    def store(self, parts: Sequence[Part]) -> None:
        """Start copying blocks down; the room in the CPU tier is there already."""
        self._start(CPU, parts)
        self.num_storing += sum(length for _, _, length in parts)

    def copy(self, run: Run, block: int, num_tokens: int) -> tuple[Transfer, OneBlock]:
        """Start copying the first tokens of one block of a run into a free GPU block; there is one."""
        ids = self._books.take(1, GPU, TASK, run.tenant)
        try:
            transfer, cargo = self.new_transfer(GPU), OneBlock(self._books, Pin(run, block + 1), ids)
            transfer.cargo = cargo
            source_ids = run.ids_in(GPU, block, block + 1)
            self._send(transfer, self._new_task(transfer, TaskKind.COPY, source_ids, ids, num_tokens))
        except BaseException:
            self._books.pools[GPU].free(ids, TASK)
            raise
        return transfer, cargo

    def send_unit(
        self,
        transfer: Transfer,
        cargo: Cargo,
        source: array[int],
        destination: array[int],
        *,
        row: int,
        num_tokens: int | None,
    ) -> None:
        """Start copying a unit of a row behind the full one into another, or its first tokens alone. Where this raises
        the destination is the caller's to give back."""
        transfer.cargo = cargo
        task = self._new_task(transfer, TaskKind.COPY, source, destination, num_tokens)
        self._send(transfer, dataclasses.replace(task, row=row))

    def copy_for_caller(
        self, kind: TaskKind, sources: array[int], cargo: CallersBlocks, num_tokens: int | None = None
    ) -> Transfer:
        """Start a copy from or into blocks that are no run's. The destinations are the task's already; where this
        raises they stay so, and are the caller's to give back."""
        transfer = self.new_transfer(CPU if kind is TaskKind.SWAP_OUT else GPU)
        transfer.cargo = cargo
        self._send(transfer, self._new_task(transfer, kind, sources, cargo.ids, num_tokens))
        return transfer

    def wipe(self, tier: Tier, ids: array[int], give: Callable[[bool], None], row: int = 0) -> None:
        """Start overwriting blocks of a tier, which are the task's, with zeros, or units of a `row` behind the full
        one. `give` gives them away when all ranks have answered; where this raises they stay the caller's."""
        transfer, nothing = self.new_transfer(tier), array("i")
        num_rows = len(self._books.rows.checkpoints.pools) if self._books.rows is not None else 0
        transfer.cargo = WipedBlocks(tier, ids, give, [number == row for number in range(1, 1 + num_rows)])
        of_cpu, of_gpu = (ids, nothing) if tier is CPU else (nothing, ids)
        task = self._new_task(transfer, TaskKind.WIPE, of_cpu, of_gpu)
        self._send(transfer, dataclasses.replace(task, row=row))

    def send_image(
        self, transfer: Transfer, cargo: Cargo, kind: TaskKind, pages: array[int], units: Sequence[array[int]]
    ) -> None:
        """Start moving a checkpoint between its units, by row, and its pages. Where this raises the destinations are
        the caller's to give back, as in `copy_for_caller`."""
        nothing, transfer.cargo = array("i"), cargo
        sources, destinations = (nothing, pages) if transfer.tier is CPU else (pages, nothing)
        task = self._new_task(transfer, kind, sources, destinations)
        self._send(transfer, dataclasses.replace(task, units=tuple([as_int32(ids) for ids in units])))

    def barrier(self, kind: TaskKind) -> Transfer:
        """An empty task: it ends when every rank's lane has done what came before it."""
        nothing = array("i")
        return self.copy_for_caller(kind, nothing, CallersBlocks(self._books, nothing, (), lambda _: None))

    def _start(self, tier: Tier, parts: Sequence[Part]) -> None:
        """All of it or nothing."""
        sources = array("i")
        for run, first, num_blocks in parts:
            start = first - run.cpu_start if tier is GPU else first
            sources += run.ids_in(CPU if tier is GPU else GPU, start, start + num_blocks)
        destinations = self._books.take(len(sources), tier, TASK, parts[0][0].tenant)
        try:
            transfer, position = self.new_transfer(tier), 0
            for run, first, num_blocks in parts:
                ids = destinations[position : position + num_blocks]
                transfer.segments.append(Segment(transfer, run, first, ids))
                position += num_blocks
            transfer.cargo = Landings(self._books, transfer, self.num_landed)
            kind = TaskKind.SWAP_IN if tier is GPU else TaskKind.SWAP_OUT
            self._send(transfer, self._new_task(transfer, kind, sources, destinations))
        except BaseException:
            self._tree.pools[tier].free(destinations, TASK)
            raise

    def new_transfer(self, tier: Tier) -> Transfer:
        """One that nobody has sent."""
        transfer = Transfer(self._next_task_id, tier, self._clock.event())
        self._next_task_id += 1
        return transfer

    def _new_task(
        self,
        transfer: Transfer,
        kind: TaskKind,
        sources: array[int],
        destinations: array[int],
        num_tokens: int | None = None,
    ) -> TransferTask:
        return TransferTask(
            task_id=transfer.task_id,
            kind=kind,
            source_ids=as_int32(sources),
            destination_ids=as_int32(destinations),
            deadline=self._clock.now() + self._timeout_seconds,
            num_tokens=num_tokens,
        )

    def _send(self, transfer: Transfer, task: TransferTask) -> None:
        """It goes out after this turn; pins keep what it reads. On failure nothing has happened."""
        assert transfer.cargo is not None
        pinned: list[Pin] = []
        try:
            for pin in transfer.cargo.pins:
                self._tree.pin(pin)
                pinned.append(pin)
            self._outbox.put(task, self.in_flight, transfer)
        except BaseException:
            for pin in pinned:
                self._tree.unpin(pin)
            raise

    # -- waiting

    def cancel_unwanted(self, transfers: Iterable[Transfer]) -> None:
        """A request has gone: of its loads, those that nobody else waits for need not begin."""
        for transfer in transfers:
            if not transfer.num_waiting and not transfer.num_ahead and not transfer.done.is_set():
                transfer.cancelled = True
                self._books.mishaps.contain("client", functools.partial(self._client.cancel, transfer.task_id))

    def use_ahead(self, transfer: Transfer) -> None:
        """A request uses the load's destinations from now on: they are not given out again, however the load ends."""
        transfer.num_ahead += 1

    def end_ahead(self, transfer: Transfer) -> None:
        """It uses them no more."""
        transfer.num_ahead -= 1
        if not transfer.num_ahead and transfer.done.is_set():
            while transfer.kept:
                self._tree.pools[transfer.tier].free(transfer.kept.pop(), TASK)
            if transfer.kept_units and self._books.rows is not None:
                self._books.rows.free_units(transfer.kept_units)
                transfer.kept_units = ()
            if not transfer.is_quarantined:
                self.in_flight.pop(transfer.task_id, None)

    # -- ending

    @property
    def num_quarantined_blocks(self) -> int:
        """Destinations that nobody may have any more; see `_finish`."""
        stuck = [t.cargo for t in self.in_flight.values() if t.is_quarantined]
        return sum(len(cargo.ids) for cargo in stuck if cargo is not None)

    def on_result(self, result: TransferResult) -> None:
        """Take the ranks' answer, or that to a task for which the client has raised. What this raises costs no other
        task, and no verb. Any thread; a turn of its own."""
        self._books.mishaps.contain("callback", functools.partial(self._take, result))

    def _take(self, result: TransferResult) -> None:
        with self._books:
            transfer = self.in_flight.get(result.task.task_id)
            self._finish(result)
        if result.error is not None:
            # nobody waits for what was cancelled; and a manager that closes cancels what its ranks have not begun
            is_wanted = not self._books.is_closed and (transfer is None or not transfer.cancelled)
            log = logger.warning if is_wanted else logger.debug
            log("event=transfer_failed task_id=%d error=%r", result.task.task_id, result.error)

    def _finish(self, result: TransferResult) -> None:
        """All ranks have answered or are reaped: land the blocks and wake who waits for them.

        Who waits is woken and called even where landing raises. Then the transfer is *quarantined*: what has not landed
        stays its own, destinations and pins, for good. Nobody knows any more what is in these blocks, so they are given
        to nobody.
        """
        transfer = self.in_flight.get(result.task.task_id)
        if transfer is None or transfer.done.is_set():  # answered before
            return
        assert transfer.cargo is not None
        transfer.succeeded = result.error is None
        transfer.seconds = max([rank.seconds for rank in result.ranks], default=0.0)
        if transfer.tier is CPU:
            self.num_storing -= sum([len(segment.ids) for segment in transfer.segments])
        if self._books.mishaps.contain("landing", functools.partial(transfer.cargo.end, transfer.succeeded)):
            transfer.cargo = None  # it points back: such a cycle for each task would be left to the garbage collector
        else:
            transfer.succeeded, transfer.is_quarantined = False, True
        if not (transfer.kept or transfer.kept_units or transfer.is_quarantined):
            del self.in_flight[transfer.task_id]
        transfer.done.set()
        calls, transfer.on_done = transfer.on_done, []
        for call in calls:
            self._books.call_later(call)
        num_lost, seconds = transfer.num_lost if transfer.tier is CPU else 0, self.tasks.end(transfer.task_id)
        self._books.note(TaskEnded(result=result, seconds=seconds, num_lost=num_lost))

    def num_coming(self, pins_of_requests: Iterable[Pin]) -> int:
        """GPU blocks that become free or evictable when the copies in flight have ended well, and what forgotten
        namespaces had is wiped."""
        held: dict[Run, int] = {}  # by requests: blocks from a run's front
        for pin in pins_of_requests:
            *above, run = pin.run.path()
            held.update((upper, upper.num_blocks) for upper in above)
            held[run] = max(held.get(run, 0), pin.end)
        in_flight = [t.cargo for t in self.in_flight.values() if t.cargo is not None and not t.done.is_set()]
        cargoes = [cargo for cargo in in_flight if not isinstance(cargo, CallersBlocks)]
        copied = {run for cargo in cargoes for pin in cargo.pins for run in pin.run.path()}
        num_coming = sum(run.num_in(GPU, run.num_held) - run.num_in(GPU, held.get(run, 0)) for run in copied)
        num_coming += self._books.pools[GPU].num_soiled + self._books.residency.num_doomed[GPU]
        return num_coming + sum(cargo.num_freed(held) for cargo in cargoes)
