"""Copies between tiers: reserve, send, then land what came. All under the manager's lock."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from fastdeploy_cache.books.block_pool import REQUEST, TASK
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, BlockCopy, CallerCopy, Pin, Run, Segment, Tier, Transfer
from fastdeploy_cache.movement.outbox import Outbox
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult, TransferTask


def ignore_copied(run: Run, num_blocks: int) -> None:
    """Without storage nobody needs to know."""


Part = tuple[Run, int, int]  # a run, its first block, number of blocks


class BlockMover:
    """Starts loads (CPU to GPU), stores (GPU to CPU) and copies within the GPU, and ends them.

    The destination ids belong to the task until every rank has answered; the source is pinned as long.
    """

    def __init__(
        self,
        tree: PrefixTree,
        client: TransferClient,
        task_timeout_seconds: float,
        on_result: Callable[[TransferResult], None],
    ) -> None:
        """`on_result` is what the client was started with."""
        self._tree = tree
        self._client = client
        self._timeout_seconds = task_timeout_seconds
        self._next_task_id = 1
        self.outbox = Outbox(client, on_result, tree.mishaps)
        self.on_copied: Callable[[Run, int], None] = ignore_copied  # a run has more blocks in the CPU tier
        self.in_flight: dict[int, Transfer] = {}
        self.is_quiet = False  # nothing is to be started
        self.ranks_without_kv: set[int] = set()  # whose workers have not attached their KV arrays (again)
        self.num_storing = 0  # blocks on their way to the CPU tier
        self.num_landed = [0, 0]  # by destination: blocks that joined it since the start
        # tasks that a full queue kept from starting
        self.num_refused = {kind: 0 for kind in TaskKind if kind.is_swap}

    def can(self, kind: TaskKind) -> bool:
        """Whether a task can be started now; a full queue means "not now", and is counted."""
        if self.is_quiet or self.ranks_without_kv:
            return False
        client, mishaps = self._client, self._tree.mishaps
        if mishaps.ask("client", lambda: client.has_room(kind), otherwise=False):
            return True
        self.num_refused[kind] += mishaps.ask("client", lambda: client.available, otherwise=False)
        return False

    def load(self, parts: Sequence[Part]) -> None:
        """Start copying blocks that are in the CPU tier only; the room on the GPU is there already."""
        self._start(GPU, parts)

    def store(self, parts: Sequence[Part]) -> None:
        """Start copying blocks down; the room in the CPU tier is there already."""
        self._start(CPU, parts)
        self.num_storing += sum([length for _, _, length in parts])

    def copy(self, run: Run, block: int, num_tokens: int) -> Transfer:
        """Start copying the first tokens of one block of a run into a free GPU block; there is one."""
        source, ids = Pin(run, block + 1), self._tree.pools[0].allocate(1, TASK)
        transfer = self._new_transfer(GPU)
        transfer.copy = BlockCopy(source, ids)
        task = self._new_task(transfer, TaskKind.COPY, run.ids[0][block : block + 1], ids, num_tokens)
        self._send(transfer, task, (source,))
        return transfer

    def copy_for_caller(
        self,
        kind: TaskKind,
        sources: array[int],
        destinations: array[int],
        copy: CallerCopy,
        num_tokens: int | None = None,
    ) -> Transfer:
        """Start a copy from or into blocks that are no run's; the destinations are the task's already."""
        transfer = self._new_transfer(CPU if kind is TaskKind.SWAP_OUT else GPU)
        transfer.caller = copy
        self._send(transfer, self._new_task(transfer, kind, sources, destinations, num_tokens), copy.pins)
        return transfer

    def barrier(self, kind: TaskKind) -> Transfer:
        """An empty task: it ends when every rank's lane has done what came before it."""
        nothing = array("i")
        return self.copy_for_caller(kind, nothing, nothing, CallerCopy(nothing, [], lambda _: None))

    def _start(self, tier: Tier, parts: Sequence[Part]) -> None:
        """All of it or nothing."""
        sources = array("i")
        for run, first, num_blocks in parts:
            start = first - run.cpu_start if tier is GPU else first
            sources += run.ids[CPU if tier is GPU else GPU][start : start + num_blocks]
        pool = self._tree.pools[tier]
        destinations = pool.allocate(len(sources), TASK)
        try:
            transfer, position = self._new_transfer(tier), 0
            for run, first, num_blocks in parts:
                ids = destinations[position : position + num_blocks]
                transfer.segments.append(Segment(transfer, run, first, ids))
                position += num_blocks
            kind = TaskKind.SWAP_IN if tier is GPU else TaskKind.SWAP_OUT
            self._send(transfer, self._new_task(transfer, kind, sources, destinations), transfer.segments)
        except BaseException:
            pool.free(destinations, TASK)
            raise

    def _new_transfer(self, tier: Tier) -> Transfer:
        transfer = Transfer(self._next_task_id, tier)
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
            source_ids=np.frombuffer(sources, np.int32),
            destination_ids=np.frombuffer(destinations, np.int32),
            deadline=time.monotonic() + self._timeout_seconds,
            num_tokens=num_tokens,
        )

    def _send(self, transfer: Transfer, task: TransferTask, pins: Iterable[Pin]) -> None:
        """It goes out when the lock has been given back; `pins` keep what it reads. On failure nothing has happened."""
        pinned: list[Pin] = []
        try:
            for pin in pins:
                self._tree.pin(pin)
                pinned.append(pin)
            self.in_flight[transfer.task_id] = transfer
            self.outbox.put(task)
        except BaseException:
            self.in_flight.pop(transfer.task_id, None)
            for pin in pinned:
                self._tree.unpin(pin)
            raise

    # -- waiting

    def cancel_unwanted(self, transfers: Iterable[Transfer]) -> None:
        """A request has gone: of its loads, those that nobody else waits for need not begin."""
        for transfer in transfers:
            if not transfer.num_waiting and not transfer.num_ahead and not transfer.done.is_set():
                transfer.cancelled = True
                self._tree.mishaps.contain("client", functools.partial(self._client.cancel, transfer.task_id))

    def use_ahead(self, transfer: Transfer) -> None:
        """A request uses the load's destinations from now on: they are not given out again, however the load ends."""
        transfer.num_ahead += 1

    def end_ahead(self, transfer: Transfer) -> None:
        """It uses them no more."""
        transfer.num_ahead -= 1
        if not transfer.num_ahead and transfer.done.is_set():
            self._tree.pools[transfer.tier].free(transfer.kept_ids, TASK)
            transfer.kept_ids = array("i")
            self.in_flight.pop(transfer.task_id, None)

    # -- ending

    @property
    def num_quarantined_blocks(self) -> int:
        """Destinations that nobody may have any more; see `finish`."""
        return sum(len(s.ids) for t in self.in_flight.values() if t.is_quarantined for s in t.segments)

    def finish(self, result: TransferResult) -> tuple[int, list[Callable[[], None]]]:
        """All ranks have answered or are reaped: land the blocks and wake who waits for them.

        Returns how many blocks of a store did not join the CPU tier, and what to call without the lock.

        Who waits is woken and called even where landing raises. Then the transfer is *quarantined*: what has not landed
        stays its own, destinations and pins, for good. Nobody knows any more what is in these blocks, so they are given
        to nobody.
        """
        transfer = self.in_flight.get(result.task.task_id)
        if transfer is None or transfer.done.is_set():  # answered before
            return 0, []
        transfer.succeeded = result.error is None
        if not self._tree.mishaps.contain("landing", lambda: self._land(transfer)):
            transfer.succeeded, transfer.is_quarantined = False, True
            self.num_storing -= sum(len(s.ids) for s in transfer.segments) if transfer.tier is CPU else 0
        if not transfer.kept_ids and not transfer.is_quarantined:
            del self.in_flight[transfer.task_id]
        transfer.done.set()
        calls, transfer.on_done = transfer.on_done, []
        return transfer.num_lost if transfer.tier is CPU else 0, calls

    def _land(self, transfer: Transfer) -> None:
        """Segment by segment, each forgotten only when it has landed."""
        while transfer.segments:
            segment = transfer.segments[0]
            num_joined = self._tree.land(segment, transfer.succeeded)
            del transfer.segments[0]
            self.num_storing -= len(segment.ids) if transfer.tier is CPU else 0
            self.num_landed[transfer.tier] += num_joined
            num_left = len(segment.ids) - num_joined
            if num_left:
                self._send_home(transfer, segment.ids[:num_left])
            transfer.num_lost += num_left
            if num_joined and transfer.tier is CPU:
                self.on_copied(segment.run, num_joined)
        if transfer.copy is not None:
            self._end_copy(transfer.copy, transfer.succeeded)
        if transfer.caller is not None:
            while transfer.caller.pins:
                self._tree.unpin(transfer.caller.pins[-1])
                transfer.caller.pins.pop()
            transfer.caller.end(transfer.succeeded)

    def _send_home(self, transfer: Transfer, ids: array[int]) -> None:
        """Ids that no run took. Where a request already reads them they stay with the task: given out again, they would
        be overwritten under a step that is running."""
        if transfer.num_ahead:
            transfer.kept_ids += ids
        else:
            self._tree.pools[transfer.tier].free(ids, TASK)

    def num_coming(self, pins_of_requests: Iterable[Pin]) -> int:
        """GPU blocks that become free or evictable when the copies in flight have ended well."""
        held: dict[Run, int] = {}  # by requests: blocks from a run's front
        for pin in pins_of_requests:
            *above, run = pin.run.path()
            held.update((upper, upper.num_blocks) for upper in above)
            held[run] = max(held.get(run, 0), pin.end)
        segments = [s for transfer in self.in_flight.values() if not transfer.done.is_set() for s in transfer.segments]
        copies = [t.copy for t in self.in_flight.values() if t.copy is not None and not t.done.is_set()]
        pins = [*segments, *(copy.source for copy in copies)]
        copied = {run for pin in pins for run in pin.run.path()}
        num_coming = sum(run.num_in(GPU, run.num_held) - run.num_in(GPU, held.get(run, 0)) for run in copied)
        num_coming += sum(len(copy.ids) for copy in copies if not copy.wanted)
        for segment in segments:
            transfer = segment.transfer
            if transfer.cancelled or (transfer.tier is GPU and segment.run.epoch != self._tree.epoch):
                num_coming += 0 if transfer.num_ahead else len(segment.ids)  # it, or its successor, joins nothing
            elif transfer.tier is GPU:
                # blocks that were computed meanwhile send the load's ids home; the others join the run
                num_superseded = max(0, min(segment.end, segment.run.num_gpu) - segment.start)
                joined_from = max(segment.start + num_superseded, held.get(segment.run, 0))
                num_home = 0 if transfer.num_ahead else num_superseded
                num_coming += num_home + max(0, segment.end - joined_from)
        return num_coming

    def _end_copy(self, copy: BlockCopy, succeeded: bool) -> None:
        """The block is its request's, if that still waits for it."""
        self._tree.unpin(copy.source)
        copy.landed = succeeded and copy.wanted
        if copy.landed:
            self._tree.pools[0].hand_over(copy.ids, TASK, REQUEST)
        else:
            self._tree.pools[0].free(copy.ids, TASK)
