"""Steps that begin before the blocks they read have all been loaded: each layer waits for its own."""

from __future__ import annotations

import time
from collections.abc import Callable

from fastdeploy_cache import Match, PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.generation import Generation

LOAD_SECONDS = 2.0  # what has not come from the CPU tier by then is computed


class LoadOverlap:
    """Follows loads layer by layer. The engine thread's.

    `load_seconds`, `waited_for_layers_seconds`: of the loads that steps ran ahead of, how long they took, and how long
    the model stood still for their layers.
    """

    def __init__(self, cache: PrefixCacheManager, *, is_wanted: bool) -> None:
        """Where it is not wanted, or no rank says how far a load is, nothing is followed."""
        self._block_size = cache.config.block_size
        ranks = range(cache.config.transfer.tp_size)
        progress = [cache.ranks.layer_progress(rank) for rank in ranks] if is_wanted and cache.config.layout else []
        self._progress = [each for each in progress if each is not None]
        self.load_seconds = self.waited_for_layers_seconds = 0.0

    def is_possible(self, generation: Generation, match: Match) -> bool:
        """Whether all that is coming is followed layer by layer. A prefill offers what is there, so it waits."""
        num_coming = len(match.coming_block_ids) * self._block_size
        can_follow = bool(self._progress) and not generation.num_offered_tokens
        return can_follow and 0 < num_coming == match.num_coming_tokens

    def follow(self, match: Match) -> None:
        """Note how long the loads of a match take from now on: without overlap the request would wait for that."""
        started = time.monotonic()

        def note() -> None:
            self.load_seconds += time.monotonic() - started

        match.on_ready(note)

    def layer_waiter(self, arrived: dict[Generation, bool]) -> Callable[[int], None]:
        """Waits until a layer is in for those that run ahead; notes for whom it was not, and waits no more for them."""
        deadline = time.monotonic() + LOAD_SECONDS

        def wait(layer: int) -> None:
            started = time.monotonic()
            for generation in [g for g, hopeful in arrived.items() if hopeful]:
                arrived[generation] = all(
                    progress.wait_layer(generation.load_ids, layer, max(0.0, deadline - time.monotonic()))
                    for progress in self._progress
                )
            self.waited_for_layers_seconds += time.monotonic() - started if arrived else 0.0

        return wait
