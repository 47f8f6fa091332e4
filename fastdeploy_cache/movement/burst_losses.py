"""Says when a burst has evicted blocks that the CPU tier would have kept. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.block_mover import BlockMover

logger = event_log(__name__)

_SOONER = 'see that all ranks stay up; then lower cpu_write_high_water, or set cpu_write_policy to "write_through"'
_RANKS = "size is no matter: nothing is copied while a rank is not up; see `fastdeploy-cache ranks` and the ranks' log"
_LARGER = "the CPU tier has no room for them; give it more blocks (num_cpu_blocks or cpu_memory_bytes)"


class BurstLosses:
    """Watches evictions that leave no copy (`evicted_blocks_total{tier="gpu", kind="dropped"}`).

    What the CPU tier has declined, as all that it holds is worth more, is not lost by a burst. A block may be declined
    more than once, so some losses are not told of; none is told of that is none.
    """

    def __init__(self, residency: Residency, cpu_pool: BlockPool, mover: BlockMover) -> None:
        self._residency, self._cpu_pool, self._mover = residency, cpu_pool, mover
        self._num_told = 0
        self.num_declined = 0  # blocks that were not copied, since what the CPU tier holds is worth more

    def look(self) -> None:
        """Log what has been lost, each time that it has doubled."""
        num_lost = self._residency.ages.num_evicted[GPU][1] - self.num_declined
        if num_lost <= 2 * self._num_told:
            return
        num_new, self._num_told = num_lost - self._num_told, num_lost
        # Into a full tier nothing is copied at once, and to copy more would only make it lose what it holds.
        is_full = self._cpu_pool.num_free < num_new
        reason, remedy = ("cpu_tier_full", _LARGER) if is_full else ("evicted_before_copied", _SOONER)
        if not self._mover.is_up:
            reason, remedy = "ranks_not_up", _RANKS
        what = "event=blocks_lost reason=%s num_blocks=%d num_cpu_blocks=%d remedy=%r"
        logger.warning(what, reason, num_lost, self._cpu_pool.num_blocks, remedy)
