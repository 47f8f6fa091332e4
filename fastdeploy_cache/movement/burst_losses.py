"""Says when a burst has evicted blocks that the CPU tier would have kept. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)


class BurstLosses:
    """Watches evictions that leave no copy (`evicted_blocks_total{tier="gpu", kind="dropped"}`).

    What the CPU tier has declined, as all that it holds is worth more, is not lost by a burst. A block may be declined
    more than once, so some losses are not told of; none is told of that is none.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._num_told = 0
        self.num_declined = 0  # blocks that were not copied, since what the CPU tier holds is worth more

    def look(self) -> None:
        """Log what has been lost, each time that it has doubled."""
        num_lost = self._residency.num_evicted[GPU][1] - self.num_declined
        if num_lost <= 2 * self._num_told:
            return
        self._num_told = num_lost
        remedy = (
            'see that all ranks are up; then lower cpu_write_high_water, or set cpu_write_policy to "write_through"'
        )
        logger.warning("event=blocks_lost reason=evicted_before_copied num_blocks=%d remedy=%r", num_lost, remedy)
