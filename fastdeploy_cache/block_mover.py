"""Copies between tiers: reserve, submit, then land what came. All but `submit` runs under the manager's lock."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence

import numpy as np

from fastdeploy_cache.block_pool import REQUEST, TASK
from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import CPU, GPU, BlockCopy, Pin, Run, Segment, Tier, Transfer, segments_of
from transfer_manager.client import TransferClient
from transfer_manager.task import Direction, TransferResult, TransferTask

Part = tuple[Run, int, int]  # a run, its first block, number of blocks


class BlockMover:
    """Starts loads (CPU to GPU) and stores (GPU to CPU) and ends them.

    The destination ids belong to the task until every rank has answered; the source is pinned as long.
    """

    def __init__(self, tree: PrefixTree, client: TransferClient, task_timeout_seconds: float) -> None:
        self._tree = tree
        self._client = client
        self._timeout_seconds = task_timeout_seconds
        self._next_task_id = 1
        self.outbox: deque[TransferTask] = deque()
        self.in_flight: dict[int, Transfer] = {}
        self.num_landed = [0, 0]  # by destination: blocks that joined it since the start

    @property
    def available(self) -> bool:
        """Whether the tiers below the GPU can be used now."""
        return self._client.available

    def load(self, parts: Sequence[Part]) -> None:
        """Start copying blocks that are in the CPU tier only; the room on the GPU is there already."""
        self._start(GPU, parts)

    def store(self, path: Sequence[Run], min_blocks: int = 1) -> int:
        """Start copying down what of a pinned path is neither copied nor on its way, if it is `min_blocks` or more.

        Of each run it begins where the copies end, not at the newest blocks: what an earlier store failed to bring is
        copied again, or its gap would keep out every later copy of the run. Evicts older copies where there is no room.
        Returns how many blocks should have been copied and could not be.
        """
        pool, residency = self._tree.pools[1], self._tree.residency
        if not pool.num_blocks:
            return 0
        parts: list[Part] = []
        for run in path:
            if num_uncopied(run) > 0:
                num_gpu = len(run.ids[0])
                first = max([num_gpu - num_uncopied(run), *[segment.end for segment in segments_of(run, CPU)]])
                if num_gpu > first:
                    parts.append((run, first, num_gpu - first))
        wanted = sum([length for _, _, length in parts])
        if wanted < min_blocks or not parts:
            return 0
        if not self.available:
            return wanted
        last = parts[-1][0]
        whole = Pin(last, last.num_blocks)  # or the eviction would take the copies that these are to continue
        self._tree.pin(whole)
        num_blocks = min(wanted, residency.num_available(CPU))
        if num_blocks:
            residency.evict(CPU, max(0, num_blocks - pool.num_free))
            self._start(CPU, first_blocks(parts, num_blocks))
        self._tree.unpin(whole)
        return wanted - num_blocks

    def copy(self, run: Run, block: int) -> Transfer:
        """Start copying one block of a run into a free GPU block; there is one."""
        transfer = self._new_transfer(GPU)
        transfer.copy = BlockCopy(Pin(run, block + 1), self._tree.pools[0].allocate(1, TASK))
        self._tree.pin(transfer.copy.source)
        self._send(transfer, Direction.COPY, run.ids[0][block : block + 1], transfer.copy.ids)
        return transfer

    def _start(self, tier: Tier, parts: Sequence[Part]) -> None:
        transfer = self._new_transfer(tier)
        destinations = self._tree.pools[tier].allocate(sum([length for _, _, length in parts]), TASK)
        sources, position = array("i"), 0
        for run, first, num_blocks in parts:
            segment = Segment(transfer, run, first, destinations[position : position + num_blocks])
            transfer.segments.append(segment)
            self._tree.pin(segment)
            start = first - run.cpu_start if tier is GPU else first
            sources += run.ids[CPU if tier is GPU else GPU][start : start + num_blocks]
            position += num_blocks
        self._send(transfer, Direction.SWAP_IN if tier is GPU else Direction.SWAP_OUT, sources, destinations)

    def _new_transfer(self, tier: Tier) -> Transfer:
        transfer = Transfer(self._next_task_id, tier)
        self._next_task_id += 1
        self.in_flight[transfer.task_id] = transfer
        return transfer

    def _send(self, transfer: Transfer, direction: Direction, sources: array[int], destinations: array[int]) -> None:
        self.outbox.append(
            TransferTask(
                task_id=transfer.task_id,
                direction=direction,
                source_ids=np.frombuffer(sources, np.int32),
                destination_ids=np.frombuffer(destinations, np.int32),
                deadline=time.monotonic() + self._timeout_seconds,
            )
        )

    def submit(self) -> None:
        """Hand what was started to the client. Without the lock: its answer may come before this returns."""
        while self.outbox:
            try:
                task = self.outbox.popleft()
            except IndexError:  # another thread took it
                return
            self._client.submit(task)

    def finish(self, result: TransferResult) -> int:
        """All ranks have answered or are reaped: land the blocks and wake who waits for them.

        Returns how many blocks of a store did not join the CPU tier.
        """
        transfer, num_lost = self.in_flight.pop(result.task.task_id), 0
        while transfer.segments:
            segment = transfer.segments.pop(0)
            num_joined = self._tree.land(segment, result.error is None)
            self.num_landed[transfer.tier] += num_joined
            num_lost += len(segment.ids) - num_joined
        if transfer.copy is not None:
            self._end_copy(transfer.copy, result.error is None)
        transfer.done.set()
        return num_lost if transfer.tier is CPU else 0

    def num_coming(self, pins_of_requests: Iterable[Pin]) -> int:
        """GPU blocks that become free or evictable when the copies in flight have ended well."""
        held: dict[Run, int] = {}  # by requests: blocks from a run's front
        for pin in pins_of_requests:
            *above, run = pin.run.path()
            held.update((upper, upper.num_blocks) for upper in above)
            held[run] = max(held.get(run, 0), pin.end)
        segments = [s for transfer in self.in_flight.values() for s in transfer.segments]
        copies = [transfer.copy for transfer in self.in_flight.values() if transfer.copy is not None]
        pins = [*segments, *(copy.source for copy in copies)]
        copied = {run for pin in pins for run in pin.run.path()}
        num_coming = sum(run.num_in(GPU, run.num_held) - run.num_in(GPU, held.get(run, 0)) for run in copied)
        num_coming += sum(len(copy.ids) for copy in copies if not copy.wanted)
        for segment in segments:
            if segment.transfer.tier is GPU:
                # blocks that were computed meanwhile send the load's ids home; the others join the run
                num_superseded = max(0, min(segment.end, segment.run.num_gpu) - segment.start)
                joined_from = max(segment.start + num_superseded, held.get(segment.run, 0))
                num_coming += num_superseded + max(0, segment.end - joined_from)
        return num_coming

    def _end_copy(self, copy: BlockCopy, succeeded: bool) -> None:
        """The block is its request's, if that still waits for it."""
        self._tree.unpin(copy.source)
        copy.landed = succeeded and copy.wanted
        if copy.landed:
            self._tree.pools[0].hand_over(copy.ids, TASK, REQUEST)
        else:
            self._tree.pools[0].free(copy.ids, TASK)


def num_uncopied(run: Run) -> int:
    """Blocks on the GPU behind the run's copies; some may be on their way."""
    return len(run.ids[0]) - (run.cpu_start + len(run.ids[1]) if run.ids[1] else 0)


def first_blocks(parts: Sequence[Part], num_blocks: int) -> list[Part]:
    """The parts, the last one cut, that hold the first `num_blocks`."""
    chosen: list[Part] = []
    for run, first, length in parts:
        if num_blocks:
            chosen.append((run, first, min(length, num_blocks)))
            num_blocks -= min(length, num_blocks)
    return chosen
