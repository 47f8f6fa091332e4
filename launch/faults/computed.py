"""What the engines of a story have computed, and so may find: the second opinion on what a cache has."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache.launch.faults.stage import Prefix


class Computed:
    """See `Findable`. Of an engine, or of all of them where they hand blocks to each other."""

    def __init__(self, now: Callable[[], int], *, is_kept: bool) -> None:
        """`now`: the step. `is_kept`: a store, or another engine, has it still when a cache has forgotten it."""
        self._now, self._is_kept = now, is_kept
        self._last_step: dict[Prefix, int] = {}  # in which it was computed
        self._first_step = 0  # what is older was forgotten

    def add(self, prefix: Prefix) -> None:
        """See `Findable`."""
        self._last_step[prefix] = self._now()

    def forget(self, first_step: int) -> None:
        """See `Findable`."""
        if not self._is_kept:
            self._first_step = max(self._first_step, first_step)

    def may_find(self, prefix: Prefix, *, is_old: bool) -> bool:
        """See `Findable`."""
        return self._last_step.get(prefix, -1) >= (0 if is_old else self._first_step)
