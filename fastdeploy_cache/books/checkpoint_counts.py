"""How many checkpoints there are in each tier, and how many have been made, refused and evicted. Under the lock."""

from __future__ import annotations

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import TIERS, Tier
from fastdeploy_cache.books.taps import Loss

_FOR_ROOM = (Loss.GPU, Loss.CPU, Loss.UNITS)


class CheckpointCounts:
    """Listens to the taps of `Checkpoints`.

    Attributes:
        num_in: by tier, those that are there now.
        num_evicted: by tier, those that have left it to make room: another tier still had them, or none had.
        num_refused: that a request would have made, and for which there was no slot, no unit or no memory.
    """

    def __init__(self) -> None:
        self.num_in = [0 for _ in TIERS]
        self.num_evicted = [[0, 0] for _ in TIERS]
        self.num_refused = 0

    def anchored(self, checkpoint: Checkpoint, tier: Tier) -> None:  # noqa: ARG002 (see `Taps`)
        """See `Taps`."""
        self.num_in[tier] += 1

    def lifted(self, checkpoint: Checkpoint, tier: Tier, why: Loss) -> None:
        """See `Taps`."""
        self.num_in[tier] -= 1
        if why in _FOR_ROOM:
            is_gone = checkpoint.units is None and checkpoint.pages is None
            self.num_evicted[tier][is_gone] += 1
