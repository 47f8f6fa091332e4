"""Storage as a tier: what is read from it and what is written to it, over one link."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Copied, ImageCopied, RoomCame, StoreDetached, Used
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.block_mover import TaskEnded
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.stats import StorageTierStats
from fastdeploy_cache.storage.audits import StorageAudits
from fastdeploy_cache.storage.forgets import StorageForgets
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.storage.prefetch import StorageLimits, StorageTaskEnded, StorageWentIdle
from fastdeploy_cache.storage.reads import StorageReads
from fastdeploy_cache.storage.unasked import UnaskedStore
from fastdeploy_cache.storage.write_out import WriteOut
from fastdeploy_cache.storage.writes import StorageWrites
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.storage.client import StorageClient
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult

logger = event_log(__name__)


class StorageTier:
    """All that the cache has of one attached store. Under the lock, but for the client's calls, which are turns."""

    def __init__(
        self, config: CacheConfig, storage: StorageConfig, books: Books, client: StorageClient, movement: Movement
    ) -> None:
        self._config, self._books, self._copy_down = config, books, movement.copy_down
        movement.speeds.forget_storage()
        sharing = [tenant.namespace for tenant in config.tenants if tenant.has_store_share]
        self.link = StorageLink(storage, books, client, movement.speeds, self.on_result, sharing=sharing)
        limits = StorageLimits.of(config)
        self.reads = StorageReads(books, self.link, limits, UnaskedStore(config, limits.min_blocks))
        self.writes = StorageWrites(books, self.link, limits)
        self.audits = StorageAudits(books, self.link)
        self.forgets = StorageForgets(books, self.link)
        self.write_out = WriteOut(config, books, self.writes, movement.copy_down)
        self.settled = books.clock.event()  # nothing is on its way
        self.settled.set()
        self.is_attached = False
        self._admission = storage.admission if storage.kind == "file" else None
        self._was_open = self._was_probed = False

    def attach(self) -> None:
        """Hear of what is copied and used from now on, and of room that comes."""
        books, config, self.is_attached = self._books, self._config, True
        self.writes.forget_stored()
        books.listen(Copied, self.write_out.on_copied)
        books.listen(ImageCopied, self.write_out.on_image_copied)
        books.listen(Used, self.write_out.on_used)
        books.listen(TaskEnded, self._on_copy_ended)
        books.listen(RoomCame, self._on_room_came)
        books.listen(StorageTaskEnded, self._go_on)
        self._copy_down.follow_storage(config.storage_write_policy, config.storage_write_min_uses)

    def detach(self) -> None:
        """Take nothing more, and answer who waits. What is on its way still comes back."""
        books, self.is_attached, self.link.is_detached = self._books, False, True
        books.note(StoreDetached())
        self.link.news.listener = 0
        books.ignore(Copied, self.write_out.on_copied)
        books.ignore(ImageCopied, self.write_out.on_image_copied)
        books.ignore(Used, self.write_out.on_used)
        self._copy_down.follow_storage(None, 1)
        self.stop()
        self.writes.pump()  # what is queued is not written any more

    def close(self) -> None:
        """Hear of nothing any more: it is detached, and every task has been answered."""
        books = self._books
        books.ignore(TaskEnded, self._on_copy_ended)
        books.ignore(RoomCame, self._on_room_came)
        books.ignore(StorageTaskEnded, self._go_on)
        self.link.close()

    @property
    def held_ids(self) -> list[int]:
        """CPU blocks that tasks of storage own."""
        return self.reads.held_ids + self.link.held_ids

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nothing queued."""
        is_busy = self.link.is_probing or not self.forgets.is_idle
        return self.reads.is_idle and self.writes.is_idle and self.audits.is_idle and not is_busy

    @property
    def tasks_in_flight(self) -> Mapping[str, int]:
        """Tasks that not every rank has answered, by kind."""
        return self.link.tasks.by_kind()

    def opened(self) -> None:
        """See `on_ready`."""
        if self._was_open:
            self.writes.forget_stored()
        elif not self.link.is_quiet:
            self.link.warn_if_unfit()
            self._probe()
        self._was_open = True
        self._books.mishaps.contain("client", self.link.news.opened)
        self.writes.pump()

    def _probe(self) -> None:
        """Where this fails, only the store's speed stays unknown: what is queued to be written does not wait for it."""
        self._was_probed = self._books.mishaps.contain("client", self.link.probe)

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing more, and answer who waits; or go on. What is queued to be written stays queued."""
        self.link.be_quiet(quiet)
        if quiet:
            self.stop()
            self._note_settled()
        else:
            if self._was_open and not self._was_probed:
                self._probe()
            self._books.mishaps.contain("client", self.link.news.go_on)
            self.writes.pump()

    def stop(self) -> None:
        """Answer who waits for the store; what is on its way comes back all the same."""
        self.reads.stop()
        self.audits.stop()

    def write(self, path: Sequence[Run]) -> None:
        """Write these runs now, whatever the policies say; what is on the GPU only is copied down for it."""
        self.write_out.write(path)
        self._copy_down.store(path, unstored=True)

    def note_admitted(self, num_tokens: int) -> None:
        """A request with so many tokens has its first blocks; once for each."""
        self.reads.unasked.note_admitted(num_tokens)

    def wait_settled(self, timeout_seconds: float) -> bool:
        """Wait until nothing is on its way, after `be_quiet`; False when the time is over first. Not under the lock."""
        return self.settled.wait(timeout_seconds)

    # -- turns of the client's threads

    def on_ready(self) -> None:
        """The store has been opened, perhaps again: then it may have lost what was not durable."""
        with self._books:
            self.opened()

    def on_result(self, result: TransferResult) -> None:
        """Every rank has answered a task, or is reaped."""
        with self._books:
            request_id = self.reads.request_of(result.task.task_id)
            self._books.mishaps.contain("landing", functools.partial(self._finish, result))
            seconds = self.link.tasks.end(result.task.task_id)
            self._books.note(StorageTaskEnded(result=result, seconds=seconds, request_id=request_id))
            self._books.mishaps.contain("landing", functools.partial(self.link.news.finish, result))
        if result.is_failure:  # not what was cancelled, as nobody waits for it any more
            logger.info("event=storage_task_failed kind=%s error=%r", result.task.kind.value, result.error)

    def _finish(self, result: TransferResult) -> None:
        if result.task.kind is TaskKind.PROBE:
            self.link.end_probe(result)
        elif result.task.kind is TaskKind.WRITE:
            written = self.writes.finish(result)
            if written is not None:
                self.write_out.go_on(written)
        elif result.task.task_id in self.link.news.asked:
            self.link.note_counts(result)
        elif self.audits.has_asked(result.task.task_id):
            self.audits.finish(result)
        elif self.forgets.has_asked(result.task.task_id):
            self.forgets.finish(result)
        else:
            self.reads.finish(result)

    # -- at the end of a turn

    def _go_on(self, _: StorageTaskEnded) -> None:
        """An answer has made room in flight."""
        try:
            self.reads.advance()
            self.writes.pump()
            self.audits.pump()
        finally:
            self._note_settled()
        if self.is_idle:
            self._books.note(StorageWentIdle())

    def _on_copy_ended(self, _: TaskEnded) -> None:
        self.reads.advance()

    def _on_room_came(self, came: RoomCame) -> None:
        if came.tier is CPU:
            self.reads.advance()

    def _note_settled(self) -> None:
        is_asking = not self.reads.is_idle or not self.audits.is_idle
        in_flight = is_asking or self.writes.num_in_flight or self.link.is_probing
        (self.settled.clear if in_flight else self.settled.set)()

    def statuses(self) -> list[RankStatus]:
        """One entry for each rank's process."""
        return self.link.client.statuses()

    def stats(self) -> StorageTierStats:
        """How it goes."""
        counts = self.link.counts.values()

        def total(name: str) -> int:
            return sum([each.get(name, 0) for each in counts], self.link.ended_counts[name])

        images = self.writes.checkpoints
        return StorageTierStats(
            is_available=self.link.client.available,
            reading=self.link.reading.state,
            writing=self.link.writing.state,
            num_fetched_blocks=self.reads.num_fetched_blocks,
            num_unasked_blocks=self.reads.num_unasked_blocks,
            num_written_blocks=self.writes.num_written_blocks,
            num_skipped_blocks=self.writes.num_skipped_blocks,
            num_fetched_checkpoints=self.reads.num_fetched_checkpoints,
            num_written_checkpoints=images.num_written if images is not None else 0,
            num_evicted_objects=total("num_evicted"),
            num_declined_objects=total("num_declined"),
            num_damaged_objects=total("num_damaged"),
            num_full_disks=total("num_full_disks"),
            num_other_weights=max([each.get("num_other_weights", 0) for each in counts], default=0),
            num_prefetches=self.reads.num_prefetches,
            num_short_prefetches=self.reads.num_short_prefetches,
            num_unasked_requests=self.reads.unasked.num_requests,
            num_long_unasked_requests=self.reads.unasked.num_long_requests,
            admission=self._admission,
        )
