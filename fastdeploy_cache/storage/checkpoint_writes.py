"""Images of checkpoints on their way to storage, each behind the full KV in front of it. Under the lock."""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

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
        """Offer it, if it has an image and was not offered."""
        stored = checkpoint.stored
        if checkpoint.pages is not None and not stored.num_blocks and not stored.num_offered:
            self._queue[checkpoint] = None

    def clear(self) -> None:
        """What is queued is not written."""
        self._queue.clear()

    def pump(self, num_room: int, *, is_alone: bool) -> None:
        """Start writing what is queued, as far as there is room in flight for so many pages; one that `is_alone` always
        has."""
        for checkpoint in list(self._queue)[:_MAX_LOOKED]:
            if not self._link.can(TaskKind.WRITE):
                return
            run: Run | None = checkpoint.run
            if run is None or run.epoch != self._tree.epoch or checkpoint.pages is None:
                del self._queue[checkpoint]
                continue
            if (front := self._front(run, checkpoint.end)) is None:
                num_pages = len(checkpoint.pages) // ID_BYTES
                if num_pages > num_room and not is_alone:
                    return
                del self._queue[checkpoint]
                self._write(checkpoint, run)
                num_room, is_alone = num_room - num_pages, False
            elif not self._is_coming(front):  # storage has declined it, or it has left the CPU tier
                del self._queue[checkpoint]

    def _front(self, run: Run, end: int) -> Run | None:
        """The first run in front of a place of which storage has not all; None: it has all."""
        for each in run.path():
            if each.stored.num_blocks < (end if each is run else each.num_blocks):
                return each
        return None

    def _write(self, checkpoint: Checkpoint, run: Run) -> None:
        pages = array("i", checkpoint.pages or b"")
        if not pages:  # at a boundary of chunks there is nothing to write
            checkpoint.stored = checkpoint.stored.but(num_blocks=1, num_offered=1)
            return
        names = page_names(self._tree.names.of(run, checkpoint.end - 1, checkpoint.end), len(pages))
        stored = checkpoint.stored.but(num_offered=1)
        task = self._link.new_task(TaskKind.WRITE, b"".join(names), sources=pages, priority=run.stored.priority)
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
        self._link.judge(result)
        checkpoint, num_pages = write.checkpoint, len(write.pages)
        if result.error is not None:
            checkpoint.stored = checkpoint.stored.but(num_offered=0)
        elif result.num_blocks == num_pages:
            self.num_written += 1
            checkpoint.stored = checkpoint.stored.but(num_blocks=1)

    def unstored(self, runs: Iterable[Run]) -> list[Checkpoint]:
        """Checkpoints of these runs that storage has not taken."""
        return [each for run in runs for each in chain_of(run) if not each.stored.num_blocks]
