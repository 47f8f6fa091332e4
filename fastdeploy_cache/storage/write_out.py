"""What is written to storage, and when: the write policies. All of it under the lock."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Sequence

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import Copied, ImageCopied, Used
from fastdeploy_cache.books.evicting import drop_spare_copies
from fastdeploy_cache.books.mishaps import contained
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.movement.copy_down import MAX_LOOKED, CopyDown
from fastdeploy_cache.storage.writes import StorageWrites

_RESERVE_SHARE = 8  # of the CPU pool, as a fraction: so much is kept written ahead of its eviction
_MAX_ASKED = 1024  # runs that are waited for; a copy that fails brings none


class WriteOut:
    """`write_through` writes what is copied to the CPU tier; `write_through_selective` what has been used often enough;
    `write_back` what the CPU tier would evict next, each with all that leads to it: a tail without its beginning is
    never found."""

    def __init__(self, config: CacheConfig, books: Books, writes: StorageWrites, copy_down: CopyDown) -> None:
        """The settings `storage_write_*` of the configuration say what is written, and when."""
        self._tree, self._writes, self._copy_down = books.tree, writes, copy_down
        self.mishaps = books.mishaps
        self._back = config.storage_write_policy == "write_back"
        is_selective = config.storage_write_policy == "write_through_selective"
        self._min_uses = config.storage_write_min_uses if is_selective else 1
        self._num_reserve = max(1, books.pools[CPU].num_blocks // _RESERVE_SHARE)
        self._num_copied = 0  # blocks since the cold end was looked at
        self._look_after = max(1, self._num_reserve // 4)  # blocks: a quarter of what the last look went over
        self._asked: OrderedDict[Run, None] = OrderedDict()  # to be written whole, copied in as many steps as it takes

    @contained("write_out", None)
    def on_copied(self, copied: Copied) -> None:
        """A run has more blocks in the CPU tier."""
        assert copied.pin is not None
        run = copied.pin.run
        if run in self._asked or (not self._back and self._is_due(run)):
            self._writes.queue(run)
        if self._back:
            self._num_copied += copied.num_blocks
            if self._num_copied >= self._look_after:
                self._look_ahead()
        self._writes.pump()

    @contained("write_out", None)
    def on_image_copied(self, copied: ImageCopied) -> None:
        """A checkpoint has an image in the CPU tier."""
        checkpoint, run = copied.checkpoint, copied.checkpoint.run
        is_due = self._min_uses == 1 or checkpoint.num_uses >= self._min_uses
        if run is not None and (run in self._asked or (not self._back and is_due)):
            self._writes.queue_checkpoint(checkpoint)
            self._writes.pump()

    @contained("write_out", None)
    def on_used(self, used: Used) -> None:
        """A path was used: what of it is copied and was not written, or was declined, is offered."""
        assert used.pin is not None
        if not self._back:
            due = [run for run in used.pin.run.path() if self._is_due(run)]
            if used.has_uncopied:
                self._ask(due)
            try:
                for run in due:
                    self._writes.offer(run)
            finally:  # what is queued would wait for whatever comes next, and that may be nothing
                self._writes.pump()

    def _is_due(self, run: Run) -> bool:
        return self._min_uses == 1 or run.num_uses >= self._min_uses

    def write(self, runs: Sequence[Run]) -> None:
        """Offer these, whatever the policy says: what has no copy yet as soon as it has one."""
        self._ask([run for run in runs if run.num_in(CPU, run.num_gpu) < run.num_gpu])
        for run in runs:
            self._writes.queue(run)
        self._writes.pump()

    def _ask(self, runs: Sequence[Run]) -> None:
        self._asked.update(dict.fromkeys(runs))
        while len(self._asked) > _MAX_ASKED:
            self._asked.popitem(last=False)

    @contained("write_out", None)
    def go_on(self, run: Run) -> None:
        """Blocks of a run are in storage: where the rest waits for room in the CPU tier, their copies make it."""
        if run not in self._asked:
            return
        if run.stored.num_blocks >= run.num_gpu or run.epoch != self._tree.epoch:  # of before a reset: nobody finds it
            del self._asked[run]
        elif run.stored.num_blocks >= run.cpu_end:
            drop_spare_copies(self._tree.residency, run)
            self._copy_down.store((run,), unstored=True)

    def _look_ahead(self) -> None:
        """Queue what the CPU tier would evict next."""
        self._num_copied = 0
        num_left = num_wanted = self._num_reserve - self._tree.pools[CPU].num_free
        with contextlib.closing(self._tree.policy.coldest(CPU)) as walk:
            for leaf in itertools.islice(walk, MAX_LOOKED):
                if num_left <= 0:
                    break
                for run in leaf.path():
                    self._writes.offer(run)
                num_left -= leaf.cpu_end - leaf.cpu_start
        self._look_after = max(1, min(self._num_reserve, num_wanted - num_left) // 4)
