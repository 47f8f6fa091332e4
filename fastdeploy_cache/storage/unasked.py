"""A store that is written to and never asked: the one mistake of an engine that nothing else shows."""

from __future__ import annotations

from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.event_log import event_log

logger = event_log(__name__)

_NUM_REQUESTS = 100  # that were long enough, before it is said


class UnaskedStore:
    """Says once that requests are admitted and no prefetch ever asked the store for them. Under the lock.

    Attributes:
        num_requests: that were admitted so far; 0 once somebody has asked.
        num_long_requests: of these, with so many tokens that a prefetch would ask for them.
    """

    def __init__(self, config: CacheConfig, min_blocks: int) -> None:
        """`min_blocks`: of a prompt, for which a prefetch would ask.

        A store that only carries blocks between instances is asked by those that receive, and perhaps never here.
        """
        self._block_size, self._min_blocks = config.block_size, min_blocks
        self._is_watching = config.peer is None or config.peer.link != "storage"
        self.num_requests = self.num_long_requests = 0

    def note_asked(self) -> None:
        """There is somebody who prefetches."""
        self._is_watching = False
        self.num_requests = self.num_long_requests = 0

    def note_admitted(self, num_tokens: int) -> None:
        """A request with so many tokens has its first blocks."""
        num_blocks = (num_tokens - 1) // self._block_size
        if not self._is_watching or not num_blocks:
            return
        self.num_requests += 1
        if num_blocks < self._min_blocks:
            return
        self.num_long_requests += 1
        if self.num_long_requests == _NUM_REQUESTS:
            logger.warning(
                "event=storage_not_asked num_requests=%d min_tokens=%d remedy=%r",
                self.num_long_requests,
                self._min_blocks * self._block_size,
                "call cache.prefetch(request) when a request is queued; match finds nothing in storage without it",
            )
