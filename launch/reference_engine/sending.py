"""Prompts that are computed for another instance: offered before the first step, told of before each."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fastdeploy_cache import PrefixCacheManager
from launch.reference_engine.generation import Generation
from launch.reference_engine.open_transfers import OpenTransfers


class Sends:
    """The engine thread's."""

    def __init__(self, cache: PrefixCacheManager, transfers: OpenTransfers) -> None:
        self._cache, self._transfers = cache, transfers
        peer, ranks = cache.config.peer, range(cache.config.transfer.tp_size)
        moves_layers = peer is not None and peer.link != "storage" and cache.config.role != "decode"
        self._progress = [cache.step_progress(rank) for rank in ranks] if moves_layers else []
        self._step = 0

    def offer(self, generation: Generation) -> None:
        """Of an admitted prefill.

        Raises:
            PeerError, CacheError: see `PrefixCacheManager.offer`.
        """
        send = self._cache.offer(generation.request)
        self._transfers.add(send)
        generation.note_send(send)

    def begin_step(self, batch: Iterable[tuple[Generation, int]]) -> Callable[[int], None]:
        """Tell of a step, so that layers go while it is computed. Call what it returns with the number of layers done.

        The model holds all ranks' shards in one process, so a layer is done on all of them at once.
        """
        sending = [(generation, n) for generation, n in batch if generation.send is not None]
        if not sending or not self._progress:
            return lambda _: None
        self._step = step = self._step + 1
        for generation, num_tokens in sending:
            self._cache.begin_step(generation.request, generation.num_computed_tokens + num_tokens, step)

        def mark(num_layers: int) -> None:
            for progress in self._progress:
                progress.mark(step, num_layers)

        return mark
