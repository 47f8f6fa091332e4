"""Copies between tiers: reserve, submit, then land what came. All but `submit` runs under the manager's lock."""

from __future__ import annotations

import time
from array import array
from collections import deque
from collections.abc import Sequence

import numpy as np

from fastdeploy_cache.block_pool import TASK
from fastdeploy_cache.prefix_tree import PrefixTree
from fastdeploy_cache.run import CPU, GPU, Run, Segment, Tier, Transfer, segments_of
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
        self._outbox: deque[TransferTask] = deque()
        self.in_flight: dict[int, Transfer] = {}
        self.num_landed = [0, 0]  # by destination: blocks that joined it since the start

    @property
    def available(self) -> bool:
        """Whether the tiers below the GPU can be used now."""
        return self._client.available

    def load(self, parts: Sequence[Part]) -> None:
        """Start copying blocks that are in the CPU tier only; the room on the GPU is there already."""
        self._start(GPU, parts)

    def store(self, run: Run) -> int:
        """Start copying down what of a pinned run is neither copied nor on its way; returns how many were not.

        It begins where the copies end, not at the newest blocks: what an earlier store failed to bring is copied again,
        or its gap would keep out every later copy of the run. Evicts older copies where there is no room.
        """
        pool, residency = self._tree.pools[CPU], self._tree.residency
        if not pool.num_blocks:
            return 0
        ends = [segment.end for segment in segments_of(run, CPU)]
        first = max(run.cpu_end if run.ids[CPU] else 0, *ends, 0)
        wanted = run.num_gpu - first
        if wanted <= 0:
            return 0
        if not self.available:
            return wanted
        num_blocks = min(wanted, residency.num_available(CPU))
        if num_blocks:
            # the run itself is held by its request, so the eviction cannot take from it
            residency.evict(CPU, max(0, num_blocks - pool.num_free))
            self._start(CPU, [(run, first, num_blocks)])
        return wanted - num_blocks

    def _start(self, tier: Tier, parts: Sequence[Part]) -> None:
        transfer = Transfer(self._next_task_id, tier)
        self._next_task_id += 1
        gpu_ids, cpu_ids = array("i"), array("i")
        for run, first, num_blocks in parts:
            ids = self._tree.pools[tier].allocate(num_blocks, TASK)
            segment = Segment(transfer, run, first, ids)
            transfer.segments.append(segment)
            self._tree.pin(segment)
            source_start = first - run.cpu_start if tier is GPU else first
            source = run.ids[CPU if tier is GPU else GPU][source_start : source_start + num_blocks]
            gpu_ids += ids if tier is GPU else source
            cpu_ids += source if tier is GPU else ids
        self.in_flight[transfer.task_id] = transfer
        self._outbox.append(
            TransferTask(
                task_id=transfer.task_id,
                direction=Direction.SWAP_IN if tier is GPU else Direction.SWAP_OUT,
                gpu_block_ids=np.array(gpu_ids, dtype=np.int32),
                cpu_block_ids=np.array(cpu_ids, dtype=np.int32),
                deadline=time.monotonic() + self._timeout_seconds,
            )
        )

    def submit(self) -> None:
        """Hand what was started to the client. Without the lock: its answer may come before this returns."""
        while self._outbox:
            try:
                task = self._outbox.popleft()
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
        transfer.done.set()
        return num_lost if transfer.tier is CPU else 0
