"""Writing all that is cached to storage, and asking whether it is there: before a planned end."""

from __future__ import annotations

from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.evicting import drop_spare_copies
from fastdeploy_cache.books.run import CPU, Run
from fastdeploy_cache.books.transfer import wait_done
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.storage.tier import StorageTier

logger = event_log(__name__)


class Flush:
    """One round of it, by a deadline of the monotonic clock. Not under the lock."""

    def __init__(self, books: Books, movement: Movement, tier: StorageTier) -> None:
        self._books, self._movement, self._tier = books, movement, tier
        self._clock = books.clock

    def run(self, deadline: float) -> bool:
        """See `Storage.flush`. What is on the GPU only goes through the CPU tier, in as many rounds as that takes."""
        num_before: int | None = None
        while True:
            with self._books:
                if not self._tier.is_attached or not self._tier.link.client.available:
                    return False
                unstored = self._unstored_runs()
                self._tier.writes.find_lost_marks(unstored)
                self._tier.write_out.write(unstored)
            if not self._tier.writes.wait_drained(deadline - self._clock.now()):
                return False
            with self._books:
                # only now: copies make room for themselves among what is written
                runs = self._unstored_runs()
                num_left = sum(run.num_blocks - run.stored.num_blocks for run in runs)
                checkpoints = self._tier.writes.checkpoints
                num_left += len(checkpoints.unstored(runs)) if checkpoints is not None else 0
                if not runs:
                    break
                if num_before is not None and num_left >= num_before:
                    return False
                num_before = num_left
                self._copy(runs)
                copies = list(self._movement.mover.in_flight.values())
            if not wait_done(copies, deadline - self._clock.now(), self._clock):
                return False
        return self._is_all_there(deadline)

    def _copy(self, runs: list[Run]) -> None:
        """Copy down what there is room for. Copies of full KV that storage has make room for the image behind them,
        which could not come otherwise: its path is kept meanwhile."""
        residency = self._books.residency
        if self._tier.writes.checkpoints is not None:
            for above in dict.fromkeys(above for run in runs for above in run.path()):
                if above.cpu and above.stored.num_blocks >= above.cpu_end:
                    drop_spare_copies(residency, above)
        num_room = residency.num_available(CPU)
        for run in runs:
            if num_room > 0:
                num_room -= max(0, run.num_gpu - run.stored.num_blocks)
                self._movement.copy_down.store((run,), unstored=True)

    def _is_all_there(self, deadline: float) -> bool:
        """Ask the store for all that is cached: it may have dropped what it took."""
        audits = self._tier.audits
        with self._books:
            if not self._tier.is_attached:
                return False
            audit = audits.start()
        audit.done.wait(self._clock.seconds_to(deadline))
        with self._books:
            if not audit.done.is_set():
                audits.give_up(audit)
            is_whole = audits.is_whole(audit) and not self._unstored_runs()
        if audit.num_missing:
            logger.warning("event=storage_dropped blocks=%d of=%d", audit.num_missing, sum(audit.num_asked.values()))
        return is_whole

    def _unstored_runs(self) -> list[Run]:
        tree, checkpoints = self._books.tree, self._tier.writes.checkpoints
        return [
            run
            for run in tree.runs()
            if run.epoch == tree.epoch
            and (run.stored.num_blocks < run.num_blocks or (checkpoints is not None and checkpoints.unstored((run,))))
        ]
