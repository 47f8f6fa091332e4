"""What is queued to be written to storage, and what is being written. Under the lock, but for waiting."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_names import BlockNames
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.books.run_notes import Stored
from fastdeploy_cache.storage.checkpoint_writes import CheckpointWrites
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.storage.prefetch import StorageLimits
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

_MIN_SWEEP = 16  # queued runs


@dataclass(eq=False)
class _Write:
    """Blocks [start, start + len(ids)) of a run, as it was then, on their way to storage."""

    run: Run
    start: int
    ids: array[int]
    last_hash: bytes

    def is_same(self, names: BlockNames) -> bool:
        """Whether the run still has these blocks at that place: it was not cut, merged or evicted meanwhile."""
        run, end = self.run, self.start + len(self.ids)
        is_there = run.parent is not None and run.num_blocks >= end
        return is_there and names.of(run, end - 1, end) == self.last_hash


class StorageWrites:
    """A write pins nothing: the CPU blocks that it reads may leave their run meanwhile, and are given out again when it
    has ended. A slow store so takes no room from anybody.

    Of each run, blocks [0, stored.num_blocks) are known to be in storage. Up to `stored.num_offered` storage was asked
    to take them, once for each use of the run: an admission filter counts.
    """

    def __init__(self, books: Books, link: StorageLink, limits: StorageLimits) -> None:
        self._tree, self._pool, self._link, self._limits = books.tree, books.pools[CPU], link, limits
        self._writes: dict[int, _Write] = {}
        self._queue: OrderedDict[Run, int] = OrderedDict()  # -> blocks that it had to offer
        self._num_writing = 0  # blocks
        self._sweep_above = _MIN_SWEEP
        self._has_lost_marks = False
        self._drained = books.clock.event()  # nothing is queued or being written
        self._drained.set()
        self.num_written_blocks = self.num_skipped_blocks = 0
        rows = books.rows
        self.checkpoints = CheckpointWrites(books, rows, link, self._is_coming) if rows is not None else None

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being written."""
        are_idle = self.checkpoints is None or self.checkpoints.is_idle
        return are_idle and not self._queue and not self._writes

    @property
    def num_in_flight(self) -> int:
        """Tasks that are writing now."""
        return len(self._writes) + (self.checkpoints.num_in_flight if self.checkpoints is not None else 0)

    def _is_coming(self, run: Run) -> bool:
        return run in self._queue or any(write.run is run for write in self._writes.values())

    def wait_drained(self, timeout_seconds: float) -> bool:
        """Wait until nothing is queued or being written; False when the time is over first. Not under the lock."""
        return self._drained.wait(max(0.0, timeout_seconds))

    def forget_stored(self) -> None:
        """It is another store, or one that may have lost what was not durable."""
        for run in self._tree.runs():
            run.stored = run.stored.front(0)
        if self.checkpoints is not None:
            self.checkpoints.forget_stored()

    def find_lost_marks(self, runs: Iterable[Run]) -> None:
        """Where a run was cut or joined while it was being written, nobody has noted that storage has it: let these
        runs be offered again, if that has happened."""
        if self._has_lost_marks:
            self._has_lost_marks = False
            being_written = {write.run for write in self._writes.values()}
            for run in runs:
                if run not in being_written:
                    run.stored = _offered_up_to(run.stored, run.stored.num_blocks)

    # -- the queue

    def offer(self, run: Run) -> None:
        """The run was used once more: what storage has declined is offered again, but not what it is just taking."""
        num_uses = max(1, run.num_uses)  # computing it is its first use
        if num_uses != run.stored.offered_use and not any(write.run is run for write in self._writes.values()):
            run.stored = run.stored.but(offered_use=num_uses, num_offered=0)
        self._queue_blocks(run)
        if self.checkpoints is not None:
            for checkpoint in chain_of(run):
                self.checkpoints.offer(checkpoint)
            self._note_queued()

    def queue(self, run: Run) -> None:
        """Offer what of this run, and of its checkpoints, has a copy and was not offered."""
        self._queue_blocks(run)
        if self.checkpoints is not None:
            for checkpoint in chain_of(run):
                self.checkpoints.queue(checkpoint)
            self._note_queued()

    def queue_checkpoint(self, checkpoint: Checkpoint) -> None:
        """The same of a checkpoint alone."""
        assert self.checkpoints is not None
        self.checkpoints.queue(checkpoint)
        self._note_queued()

    def _note_queued(self) -> None:
        if not self.is_idle:
            self._drained.clear()

    def _queue_blocks(self, run: Run) -> None:
        if self._start_of(run) < run.cpu_end:
            self._queue[run] = run.cpu_end - self._start_of(run)
            self._drained.clear()
            if len(self._queue) > self._sweep_above:
                self._sweep()

    @staticmethod
    def _start_of(run: Run) -> int:
        return max(run.stored.num_blocks, run.stored.num_offered)

    def _is_there(self, run: Run) -> bool:
        """Whether what comes next to be written of a run has a copy."""
        alive = run.parent is not None and run.epoch == self._tree.epoch
        return alive and run.cpu_start <= self._start_of(run) < run.cpu_end

    def _sweep(self) -> None:
        """Forget what has left the CPU tier unwritten: while a store is away the queue is no longer than the tier."""
        for run in [run for run in self._queue if not self._is_there(run)]:
            self.num_skipped_blocks += self._queue.pop(run)
        self._sweep_above = max(_MIN_SWEEP, 2 * len(self._queue))

    # -- writing

    def pump(self) -> None:
        """Start writing what is queued, as far as there is room in flight."""
        # Images first: else blocks would take all the room, and fill the store with what nobody can use.
        if not self._pump_images():
            self._start_writes()
            self._pump_images()  # what has just been left out has no use for its image
        is_open = self._link.writing.is_closed and not self._link.is_unfit
        if not self.is_idle and (self._link.is_detached or not is_open):  # nobody is owed a backlog
            self.num_skipped_blocks += sum(self._queue.values())
            self._queue.clear()
            if self.checkpoints is not None:
                self.checkpoints.clear()
        if self.is_idle:
            self._drained.set()

    @property
    def _num_busy(self) -> int:
        """Blocks and pages that are being written."""
        return self._num_writing + (self.checkpoints.num_writing if self.checkpoints is not None else 0)

    @property
    def _num_room(self) -> int:
        return self._limits.max_writing_blocks - self._num_busy

    def _pump_images(self) -> bool:
        images = self.checkpoints
        return images is not None and images.pump(self._num_room, is_alone=not self._num_busy)

    def _start_writes(self) -> None:
        while self._queue and self._link.can(TaskKind.WRITE):
            num_room = self._num_room
            if num_room <= 0:
                return
            run = next(iter(self._queue))
            if not self._is_there(run):
                num_gone = self._queue.pop(run)
                self.num_skipped_blocks += num_gone if run.parent is None else 0
                continue
            start = self._start_of(run)
            num_blocks = min(run.cpu_end - start, num_room, self._limits.chunk_blocks)
            try:
                self._write(run, start, num_blocks)
            except MemoryError:  # left in the queue it would wait for whatever comes next, and that may be nothing
                self._tree.mishaps.note("write_out")
                self.num_skipped_blocks += self._queue.pop(run)
                continue
            self._queue[run] -= num_blocks
            if start + num_blocks == run.cpu_end:
                del self._queue[run]

    def _write(self, run: Run, start: int, num_blocks: int) -> None:
        ids = run.ids_in(CPU, start - run.cpu_start, start - run.cpu_start + num_blocks)
        hashes = self._tree.names.of(run, start, start + num_blocks)
        tokens = b""
        if self._link.client.needs_token_ids:
            *above, _ = run.path()
            tokens = b"".join([bytes(upper.tokens) for upper in above])
            tokens += bytes(run.tokens[: (start + num_blocks) * self._tree.block_bytes])
        namespace, priority = run.root().namespace, run.stored.priority
        task = self._link.new_task(
            TaskKind.WRITE,
            namespace,
            hashes,
            sources=ids,
            token_ids=tokens,
            priority=priority,
            detail=self._link.above(run, start),
        )
        # Noted before it can go out: blocks that are not known to be read are given out again, and what is filled into
        # them would be written under the hash of what was there.
        self._pool.begin_reading(ids)
        try:
            offered = run.stored.but(num_offered=start + num_blocks)
            self._link.outbox.put(task, self._writes, _Write(run, start, ids, hashes[-HASH_BYTES:]))
        except BaseException:
            self._pool.end_reading(ids)
            raise
        run.stored = offered
        self._num_writing += num_blocks

    def finish(self, result: TransferResult) -> Run | None:
        """A write has ended. Returns the run where it has more blocks in storage now; `pump` goes on."""
        if self.checkpoints is not None and self.checkpoints.has(result.task.task_id):
            self.checkpoints.finish(result)
            return None
        write = self._writes.pop(result.task.task_id)
        self._pool.end_reading(write.ids)
        self._num_writing -= len(write.ids)
        self._link.judge(result)
        run, num_stored = write.run, result.num_blocks if result.error is None else 0
        written: Run | None = None
        self.num_written_blocks += num_stored
        self.num_skipped_blocks += len(write.ids) - num_stored
        if not self._tree.mishaps.ask("write_out", lambda: write.is_same(self._tree.names), otherwise=False):
            self._has_lost_marks = True
        else:
            if result.error is not None:
                run.stored = _offered_up_to(run.stored, write.start)
            elif run.stored.num_blocks >= write.start:
                num_there = max(run.stored.num_blocks, write.start + num_stored)
                run.stored = run.stored.but(num_blocks=num_there)
                written = run
            if num_stored < len(write.ids) and result.error is None and run.num_uses > run.stored.offered_use:
                self.offer(run)  # it was used again meanwhile
        return written


def _offered_up_to(stored: Stored, num_blocks: int) -> Stored:
    """No more of the run counts as offered."""
    return stored if stored.num_offered <= num_blocks else stored.but(num_offered=num_blocks)
