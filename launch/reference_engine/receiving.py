"""Prompts whose blocks another instance computes: received while they wait, and matched after that."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import CacheError, OutOfBlocksError, PeerError, PeerRefusedError
from fastdeploy_cache.launch.reference_engine.generation import Generation, GenerationError
from fastdeploy_cache.launch.reference_engine.open_transfers import Hold, OpenTransfers

logger = logging.getLogger(__name__)


class Receives:
    """Who holds blocks here waits for none: receives begin in the order of the queue, and what has landed is given up
    where nothing else can go on. The engine thread's."""

    def __init__(
        self, cache: PrefixCacheManager, transfers: OpenTransfers, *, max_open: int, can_recompute: bool
    ) -> None:
        """No more than `max_open` prompts hold blocks before they run. Without `can_recompute` a prompt whose blocks do
        not come has failed."""
        self._cache, self._transfers = cache, transfers
        self._max_open, self._can_recompute = max_open, can_recompute
        self._open: list[Generation] = []  # oldest first: on the way, or landed and not matched
        peer = cache.config.peer
        self.hold = Hold(transfers, peer.receive_timeout_seconds if peer is not None else 0.0)

    def waits(self, generation: Generation) -> bool:
        """Its blocks are on their way, or cannot be asked for now: it is not to be matched yet."""
        is_full = len(self._open) >= self._max_open
        return generation.is_receiving or (generation.offer is not None and (is_full or bool(self.hold.seconds_left)))

    def begin_next(self, waiting: Iterable[Generation]) -> None:
        """Begin those that are next, as far as there is room."""
        for generation in waiting:
            if generation.offer is None:
                continue
            if self.waits(generation):
                return
            try:
                self._begin(generation)
            except CacheError:  # it is asked again when it is its turn
                return

    def is_settled(self, generation: Generation) -> bool:
        """Whether it can be matched now; False while its blocks are on their way, or cannot be asked for.

        Each answer True is for one match.

        Raises:
            OutOfBlocksError: no room to receive them now.
            GenerationError: they did not come, and are not to be computed here.
        """
        if generation.offer is not None and not self.waits(generation):
            self._begin(generation)
        if generation.offer is not None or generation.is_receiving:
            return False
        if generation.receive is not None:
            receive = generation.receive
            self.forget(generation)
            if receive.succeeded:
                generation.num_peer_tokens = receive.num_blocks * self._cache.config.block_size
            else:
                generation.receive_error = f"{receive.reason}: {receive.error}"
        if generation.receive_error is not None:
            self._do_without(generation)
        return True

    def give_back(self) -> bool:
        """Let the blocks that have come for the youngest be evicted; False where nobody has any."""
        for generation in reversed(self._open):
            if generation.receive is not None and generation.receive.succeeded:
                self._cache.peers.cancel_receive(generation.request)
                self.forget(generation)
                return True
        return False

    def forget(self, generation: Generation) -> None:
        """It is being matched, or has gone."""
        if generation.receive is not None:
            self._open.remove(generation)
            generation.receive = None

    def _begin(self, generation: Generation) -> None:
        """Nothing changes where it cannot be now. Raises `OutOfBlocksError`: then the offer stays, too."""
        assert generation.offer is not None
        try:
            is_lent = generation.is_lent
            receive = self._cache.peers.receive(generation.request, generation.offer, is_lent=is_lent)
        except OutOfBlocksError:
            raise
        except CacheError as error:
            may_be_later = isinstance(error, PeerError) and not isinstance(error, PeerRefusedError)
            if may_be_later and self.hold.begin(generation):
                return
            generation.offer, generation.receive_error = None, str(error)
            return
        generation.offer, generation.receive = None, receive
        self._open.append(generation)
        self._transfers.add(receive.on_done)

    def _do_without(self, generation: Generation) -> None:
        request, error, generation.receive_error = generation.request, generation.receive_error, None
        action = "recompute" if self._can_recompute else "fail"
        logger.warning("event=not_received request=%s action=%s error=%r", request.request_id, action, error)
        if not self._can_recompute and not generation.is_lent:  # what is lent saves time, and no more
            raise GenerationError(f"the blocks of another instance did not come: {error}")
        self._cache.prefetch(request)  # it was not, as the blocks were to come
