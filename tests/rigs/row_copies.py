"""Copies between the tiers on a bench of rows: blocks and units in tasks that end apart, well or not."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache.books.arrivals import land
from fastdeploy_cache.books.block_pool import TASK
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.checkpoints import all_checkpoints
from fastdeploy_cache.books.run import CPU, GPU, Run
from fastdeploy_cache.books.transfer import Transfer, segments_of
from tests.rigs.row_bench import Going, Load, RowBench


class RowCopies:
    """Starts copies down, and ends all copies."""

    def __init__(self, bench: RowBench, settle: Callable[[Going], None]) -> None:
        """`settle`: of a request whose loads have ended."""
        self.bench, self._settle = bench, settle

    def store(self) -> None:
        """Copy a checkpoint's full KV down and its image, in tasks of their own; or one of both."""
        found = [each for each in all_checkpoints(self.bench.tree) if each.run.epoch == self.bench.tree.epoch]
        if not found or not self.bench.books.pools[CPU].num_blocks:
            return
        checkpoint, what = self.bench.random.choice(found), self.bench.random.random()
        pin = self.bench.hold(checkpoint)  # room must not be made of the source
        if what < 0.8:
            self._store_blocks(checkpoint.run.path())
        if what > 0.2:
            self._store_image(checkpoint)
        self.bench.let_go(checkpoint, pin)

    def _store_blocks(self, path: list[Run]) -> None:
        parts = []
        for run in path:
            first = run.cpu_end if run.cpu else 0
            if not segments_of(run, CPU) and first < run.num_gpu:
                parts.append((run, first, min(run.num_gpu, run.num_held) - first))
        parts = [part for part in parts if part[2] > 0]
        number = sum(length for _, _, length in parts)
        if 0 < number <= self.bench.books.residency.num_available(CPU):
            transfer = self.bench.transfer(CPU)
            self.bench.fill(transfer, parts, self.bench.books.take(number, CPU, TASK))
            self.bench.tasks.append(Load(transfer))
            self.bench.count("store")

    def _store_image(self, checkpoint: Checkpoint) -> None:
        is_stored = checkpoint.pages is not None or any(task.checkpoint is checkpoint for task in self.bench.tasks)
        number = self.bench.row_books.checkpoints.sizes.num_pages(checkpoint.boundary)
        if checkpoint.units is None or is_stored or number > self.bench.books.residency.num_available(CPU):
            return
        pages = self.bench.books.take(number, CPU, TASK)
        self.bench.tasks.append(Load(checkpoint=checkpoint, pin=self.bench.hold(checkpoint), pages=pages))
        self.bench.count("image")

    def end_task(self) -> None:
        """A task ends, well or not; what has not joined is garbage, and goes home."""
        task = self.bench.tasks.pop(self.bench.random.randrange(len(self.bench.tasks)))
        succeeded = self.bench.random.random() < 0.75
        if task.transfer is not None:
            self._end_blocks(task.transfer, succeeded)
        elif task.checkpoint is not None and task.pin is not None:
            self._end_checkpoint(task, task.checkpoint, succeeded)
            self.bench.let_go(task.checkpoint, task.pin)
        task.is_done = True
        for going in [each for each in self.bench.going if each.loads and all(load.is_done for load in each.loads)]:
            self._settle(going)

    def _end_blocks(self, transfer: Transfer, succeeded: bool) -> None:
        tier, source = transfer.tier, GPU if transfer.tier is CPU else CPU
        while transfer.segments:
            segment = transfer.segments[-1]
            if succeeded:
                memory, run, start = self.bench.memory.tiers, segment.run, segment.start
                for place, block in enumerate(segment.ids):
                    at = start + place - (run.cpu_start if source is CPU else 0)
                    ids = run.ids_in(source)
                    held = memory[source].get(ids[at]) if 0 <= at < len(ids) else None
                    memory[tier][block] = held or ("garbage", 0)
            else:
                for block in segment.ids:
                    self.bench.memory.tiers[tier][block] = ("garbage", 0)
            self.bench.oracle.written(tier, segment.ids)
            transfer.segments.pop()
            num_joined = land(self.bench.tree, segment, succeeded)
            rest = segment.ids[: len(segment.ids) - num_joined]
            if rest:
                self.bench.books.pools[tier].free(rest, TASK)

    def _end_checkpoint(self, task: Load, checkpoint: Checkpoint, succeeded: bool) -> None:
        if task.pages is not None:
            key = self.bench.key_of(checkpoint)
            for place, page in enumerate(task.pages):
                self.bench.memory.tiers[1][page] = ("image", key, place) if succeeded else ("garbage", 0)
            self.bench.oracle.written(CPU, task.pages)
            self.bench.row_books.end_pages(checkpoint, task.pages, succeeded)
            return
        keys = self.bench.keys_to(checkpoint)
        for number, (row, ids) in enumerate(zip(self.bench.rows, task.units, strict=True)):
            for position, unit in enumerate(ids, row.first_block(checkpoint.boundary)):
                self.bench.units(number)[unit] = (number, keys[position + 1]) if succeeded else ("garbage", 0)
        try:
            self.bench.row_books.end_units(checkpoint, task.units, succeeded)
        except MemoryError:
            self.bench.row_books.end_units(checkpoint, task.units, succeeded=False)
