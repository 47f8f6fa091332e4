"""How often what blocks held was forgotten, and why: one counter for the whole cache."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why what blocks held is not cached any more."""

    RESET = "reset"  # it is worth nothing: other weights, or the engine wants it so
    GPU_LOST = "gpu_lost"  # the bytes on the GPU have gone
    CPU_LOST = "cpu_lost"  # the bytes in the CPU tier have gone
    FORGOTTEN = "forgotten"  # a namespace was forgotten: whose a caller's blocks are, is not known


class Generations:
    """Whoever keeps a number of `current` can ask later what has happened since. Under the lock.

    Attributes:
        current: raised each time.
        last_reset: the generation that the last reset has begun; 0 before the first.
        last_gpu_loss: likewise of the last loss of the bytes on the GPU.
    """

    def __init__(self) -> None:
        self.current = self.last_reset = self.last_gpu_loss = 0

    def begin(self, reason: Reason) -> None:
        """What was noted under an earlier number is of the past, for this reason."""
        self.current += 1
        if reason is Reason.RESET:
            self.last_reset = self.current
        elif reason is Reason.GPU_LOST:
            self.last_gpu_loss = self.current
