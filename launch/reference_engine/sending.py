"""Prompts that are computed for another instance: offered before the first step, told of before each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.errors import PeerError, PeerRefusedError
from fastdeploy_cache.launch.reference_engine.generation import Generation
from fastdeploy_cache.launch.reference_engine.open_transfers import Hold, OpenTransfers


class Sends:
    """The engine thread's."""

    def __init__(self, cache: PrefixCacheManager, transfers: OpenTransfers) -> None:
        self._cache, self._transfers = cache, transfers
        peer, ranks = cache.config.peer, range(cache.config.transfer.tp_size)
        moves_layers = peer is not None and peer.link != "storage" and cache.config.role != "decode"
        self._progress = [cache.peers.step_progress(rank) for rank in ranks] if moves_layers else []
        self._step = 0
        self.hold = Hold(transfers, peer.offer_timeout_seconds if peer is not None else 0.0)

    def waits(self, generation: Generation) -> bool:
        """Whether it is a prefill, and none can be offered now."""
        return bool(generation.num_offered_tokens and self.hold.seconds_left)

    def offer(self, generation: Generation) -> bool:
        """Offer the blocks of an admitted prefill; False where it has to wait for others to end.

        Raises:
            PeerError, CacheError: see `cache.peers.offer`; it is not possible at all, or not in time.
        """
        try:
            send = self._cache.peers.offer(generation.request)
        except PeerRefusedError:
            raise
        except PeerError:
            if self.hold.begin(generation):
                return False
            raise
        self._transfers.add(send.on_done)
        generation.note_send(send)
        return True

    def begin_step(self, batch: Iterable[tuple[Generation, int]]) -> Callable[[int], None]:
        """Tell of a step, so that layers go while it is computed. Call what it returns with the number of layers done.

        The model holds all ranks' shards in one process, so a layer is done on all of them at once.
        """
        sending = [(generation, n) for generation, n in batch if generation.send is not None]
        if not sending or not self._progress:
            return lambda _: None
        self._step = step = self._step + 1
        for generation, num_tokens in sending:
            self._cache.peers.begin_step(generation.request, generation.num_computed_tokens + num_tokens, step)

        def mark(num_layers: int) -> None:
            for progress in self._progress:
                progress.mark(step, num_layers)

        return mark
