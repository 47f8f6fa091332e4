"""How often what blocks held was forgotten, and why: one counter for the whole cache."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """Why what blocks held is not cached any more."""

    RESET = "reset"  # it is worth nothing: other weights, or the engine wants it so
    GPU_LOST = "gpu_lost"  # the bytes on the GPU have gone
    CPU_LOST = "cpu_lost"  # the bytes in the CPU tier have gone


class Generations:
    """Whoever keeps a number of `current` can ask later what has happened since. Under the lock."""

    def __init__(self) -> None:
        self.current = 0
        self._last = dict.fromkeys(Reason, 0)  # the generation that began last for that reason

    def begin(self, reason: Reason) -> None:
        """What was noted under an earlier number is of the past, for this reason."""
        self.current += 1
        self._last[reason] = self.current

    def has_had(self, reason: Reason, since: int) -> bool:
        """Whether a generation has begun for this reason after number `since`."""
        return self._last[reason] > since
