"""Images of checkpoints on their way to storage, each behind the full KV in front of it. Under the lock."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice

from fastdeploy_cache.books.block_names import BlockNames
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.checkpoints import all_checkpoints
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import CPU, ID_BYTES, Run
from fastdeploy_cache.books.run_notes import NOT_STORED
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.transfer_manager.storage.keys import page_names
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

_MAX_LOOKED = 64  # queued checkpoints that one call goes over
_MIN_SWEEP = 16


def names_of_image(names: BlockNames, checkpoint: Checkpoint, num_pages: int) -> bytes:
    """What the pages of a checkpoint in the tree are called in storage, joined."""
    return b"".join(page_names(names.of(checkpoint.run, checkpoint.end - 1, checkpoint.end), num_pages))


@dataclass(eq=False)
class _ImageWrite:
    """A checkpoint's pages, as they were then, on their way to storage."""

    checkpoint: Checkpoint
    pages: array[int]


class CheckpointWrites:
    """A checkpoint is of no use without the full KV in front of it. So its image is written when storage has all of
    that; where storage declines some, it is offered again with the next use of both."""

    def __init__(self, books: Books, rows: RowBooks, link: StorageLink, is_coming: Callable[[Run], bool]) -> None:
        """`is_coming`: whether more of a run is queued, or being written."""
        self._tree, self._rows, self._pool, self._link = books.tree, rows.checkpoints, books.pools[CPU], link
        self._is_coming = is_coming
        self._queue: OrderedDict[Checkpoint, None] = OrderedDict()
        self._writes: dict[int, _ImageWrite] = {}
        self._sweep_above = _MIN_SWEEP
        self.num_written = 0

    @property
    def is_idle(self) -> bool:
        """Whether nothing is queued or being written."""
        return not self._queue and not self._writes

    @property
    def num_in_flight(self) -> int:
        """Tasks that are writing now."""
        return len(self._writes)

    @property
    def num_writing(self) -> int:
        """Pages that are being written."""
        return sum([len(write.pages) for write in self._writes.values()])

    def has(self, task_id: int) -> bool:
        """Whether a write is one of these."""
        return task_id in self._writes

    def forget_stored(self) -> None:
        """It is another store, or one that may have lost what was not durable."""
        for checkpoint in all_checkpoints(self._tree):
            checkpoint.stored = NOT_STORED

    def offer(self, checkpoint: Checkpoint) -> None:
        """It was used once more: what storage has declined is offered again."""
        num_uses = max(1, checkpoint.num_uses)
        is_writing = any(write.checkpoint is checkpoint for write in self._writes.values())
        if num_uses != checkpoint.stored.offered_use and not is_writing:
            checkpoint.stored = checkpoint.stored.but(offered_use=num_uses, num_offered=0)
        self.queue(checkpoint)

    def queue(self, checkpoint: Checkpoint) -> None:
        """Offer it, if it has an image and was not offered. At a boundary of chunks there is nothing to write."""
        stored = checkpoint.stored
        if checkpoint.pages and not stored.num_blocks and not stored.num_offered:
            self._queue[checkpoint] = None
            if len(self._queue) > self._sweep_above:
                self._sweep()

    def _is_there(self, checkpoint: Checkpoint) -> bool:
        return self._rows.is_here(checkpoint) and bool(checkpoint.pages)

    def _sweep(self) -> None:
        """Forget what has left the CPU tier unwritten: while a store is away the queue is no longer than the tier."""
        for checkpoint in [each for each in self._queue if not self._is_there(each)]:
            del self._queue[checkpoint]
        self._sweep_above = max(_MIN_SWEEP, 2 * len(self._queue))

    def clear(self) -> None:
        """What is queued is not written."""
        self._queue.clear()

    def pump(self, num_room: int, *, is_alone: bool) -> bool:
        """Start writing what is queued, as far as there is room in flight for so many pages; one that `is_alone` always
        has. Whether one waits for room alone."""
        for checkpoint in list(islice(self._queue, _MAX_LOOKED)):
            if not self._link.can(TaskKind.WRITE):
                return False
            try:
                num_pages = self._next(checkpoint)
                if num_pages > num_room and not is_alone:
                    return True
                if num_pages >= 0:
                    del self._queue[checkpoint]
                if num_pages > 0:
                    self._write(checkpoint)
                    num_room, is_alone = num_room - num_pages, False
            except MemoryError:  # left in the queue it would wait for whatever comes next, and that may be nothing
                self._tree.mishaps.note("write_out")
                self._queue.pop(checkpoint, None)
        return False

    def _next(self, checkpoint: Checkpoint) -> int:
        """How many pages of it are to be written now; 0: none, it is over; less than 0: its full KV is still coming."""
        if not self._is_there(checkpoint):
            return 0
        front = self._front(checkpoint.run, checkpoint.end)
        if front is None:
            return len(checkpoint.pages or b"") // ID_BYTES
        return -1 if self._is_coming(front) else 0  # else storage has declined it, or it has left the CPU tier

    def _front(self, run: Run, end: int) -> Run | None:
        """The first run in front of a place of which storage has not all; None: it has all."""
        for each in run.path():
            if each.stored.num_blocks < (end if each is run else each.num_blocks):
                return each
        return None

    def _write(self, checkpoint: Checkpoint) -> None:
        pages = array("i", checkpoint.pages or b"")
        names, priority = names_of_image(self._tree.names, checkpoint, len(pages)), checkpoint.run.stored.priority
        stored = checkpoint.stored.but(num_offered=1)
        namespace = checkpoint.run.root().namespace
        above = self._link.above(checkpoint.run, checkpoint.end)
        task = self._link.new_task(TaskKind.WRITE, namespace, names, sources=pages, priority=priority, detail=above)
        self._pool.begin_reading(pages)  # first: see `StorageWrites`
        try:
            self._link.outbox.put(task, self._writes, _ImageWrite(checkpoint, pages))
        except BaseException:
            self._pool.end_reading(pages)
            raise
        checkpoint.stored = stored

    def finish(self, result: TransferResult) -> None:
        """A write has ended; `pump` goes on."""
        write = self._writes.pop(result.task.task_id)
        self._pool.end_reading(write.pages)
        checkpoint, num_pages = write.checkpoint, len(write.pages)
        if result.error is not None:
            checkpoint.stored = checkpoint.stored.but(num_offered=0)
        elif result.num_blocks == num_pages:
            self.num_written += 1
            checkpoint.stored = checkpoint.stored.but(num_blocks=1)
        elif checkpoint.num_uses > checkpoint.stored.offered_use:
            self.offer(checkpoint)  # it was used again meanwhile
        self._link.judge(result)

    def unstored(self, runs: Iterable[Run]) -> list[Checkpoint]:
        """Checkpoints of these runs that storage has not taken."""
        sizes = self._rows.sizes
        found = (each for run in runs for each in chain_of(run) if not each.stored.num_blocks)
        return [each for each in found if sizes.num_pages(each.boundary)]
