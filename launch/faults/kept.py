"""What a cache keeps of a request: a verb that it refuses leaves that as it was."""

from __future__ import annotations

from dataclasses import dataclass

from fastdeploy_cache import PrefixCacheManager, Request
from fastdeploy_cache.requests.active_request import RequestPhase


@dataclass(frozen=True)
class Kept:
    """`blocks`: of a request that is there and whose match is settled, its blocks and how far they are committed. Until
    then loads change it, too."""

    is_there: bool
    generation: int = 0
    blocks: tuple[object, ...] | None = None

    def is_touched(self, before: Kept) -> bool:
        """Whether a refused verb has left a trace in between; what resets and losses change does not count."""
        if self.blocks is None or before.blocks is None or self.generation != before.generation:
            return self.is_there != before.is_there
        return self.blocks != before.blocks


def kept_of(cache: PrefixCacheManager, request: Request) -> Kept:
    """What it keeps now."""
    if request.request_id not in cache._requests:
        return Kept(is_there=False)
    active, generation = cache._requests.active(request), cache._books.tree.generation
    if active.phase is not RequestPhase.SETTLED:
        return Kept(is_there=True, generation=generation)
    ids = active.block_ids.tobytes(), active.duplicates.tobytes()
    blocks = (*ids, active.num_matched_blocks, active.num_committed_blocks, active.num_computed_tokens)
    return Kept(is_there=True, generation=generation, blocks=blocks)
