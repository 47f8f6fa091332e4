"""Storage as a tier: what is read from it and what is written to it, over one link."""

from __future__ import annotations

import threading

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.stats import StorageTierStats
from fastdeploy_cache.storage.audits import StorageAudits
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.storage.prefetch import StorageLimits
from fastdeploy_cache.storage.reads import StorageReads
from fastdeploy_cache.storage.writes import StorageWrites
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult


class StorageTier:
    """All that a manager has of one attached store. Under the manager's lock."""

    def __init__(self, tree: PrefixTree, link: StorageLink, limits: StorageLimits) -> None:
        self.link = link
        self.reads = StorageReads(tree, link, limits)
        self.writes = StorageWrites(tree, link, limits)
        self.audits = StorageAudits(tree, link)
        self.settled = threading.Event()  # nothing is on its way
        self.settled.set()
        self._was_open = self._was_probed = False

    @property
    def held_ids(self) -> list[int]:
        """CPU blocks that tasks of storage own."""
        return self.reads.held_ids + self.link.held_ids

    @property
    def is_idle(self) -> bool:
        """Whether nothing is on its way, and nothing queued."""
        return self.reads.is_idle and self.writes.is_idle and self.audits.is_idle and not self.link.is_probing

    def opened(self) -> None:
        """The store has been opened, perhaps again: then it may have lost what was not durable."""
        if self._was_open:
            self.writes.forget_stored()
        elif not self.link.is_quiet:
            self.link.probe()
            self._was_probed = True
        self._was_open = True
        self.writes.pump()

    def be_quiet(self, quiet: bool) -> None:
        """Start nothing more, and answer who waits; or go on. What is queued to be written stays queued."""
        self.link.is_quiet = quiet
        if quiet:
            self.stop()
            self._note_settled()
        else:
            if self._was_open and not self._was_probed:
                self.link.probe()
                self._was_probed = True
            self.writes.pump()

    def stop(self) -> None:
        """Answer who waits for the store; what is on its way comes back all the same."""
        self.reads.stop()
        self.audits.stop()

    def _note_settled(self) -> None:
        is_asking = not self.reads.is_idle or not self.audits.is_idle
        in_flight = is_asking or self.writes.num_in_flight or self.link.is_probing
        (self.settled.clear if in_flight else self.settled.set)()

    def finish(self, result: TransferResult) -> None:
        """All ranks have answered or are reaped."""
        try:
            if result.task.kind is TaskKind.PROBE:
                self.link.end_probe(result)
                self.writes.pump()
            elif result.task.kind is TaskKind.WRITE:
                self.writes.finish(result)
            elif self.audits.has_asked(result.task.task_id):
                self.audits.finish(result)
            else:
                self.reads.finish(result)
            self.audits.pump()  # its task may have been what took the room
        finally:
            self._note_settled()

    def stats(self) -> StorageTierStats:
        """How it goes."""
        counts = self.link.counts.values()

        def total(name: str) -> int:
            return sum(each.get(name, 0) for each in counts)

        return StorageTierStats(
            is_available=self.link.client.available,
            reading=self.link.reading.state,
            writing=self.link.writing.state,
            num_fetched_blocks=self.reads.num_fetched_blocks,
            num_unasked_blocks=self.reads.num_unasked_blocks,
            num_written_blocks=self.writes.num_written_blocks,
            num_skipped_blocks=self.writes.num_skipped_blocks,
            num_evicted_objects=total("num_evicted"),
            num_declined_objects=total("num_declined"),
            num_damaged_objects=total("num_damaged"),
        )
