"""Boundaries behind which a window, or a state, is in the CPU tier. One thread."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.adapters.sglang_linker.page_cache import HeldPages, PageCache

_MOST_PAGES = 4096  # that are looked at, from the last on


class Ends:
    """The boundaries of one pool, in front of the full pages that were found. What it finds is held."""

    def __init__(self, cache: PageCache, keys: Sequence[bytes], reach: int) -> None:
        """`reach`: pages that are needed in front of a boundary, or as many as there are."""
        self.cache, self.held = cache, HeldPages([])
        self._keys, self._reach = keys, reach
        self._first = max(0, len(keys) - _MOST_PAGES)
        self._runs = [0] * (len(keys) + 1)  # behind each page, how many in a row end there

    def find(self) -> None:
        """Look at the pages that are known here, from the last on: one look for a chain, not for a page."""
        is_there, at = [False] * len(self._keys), len(self._keys)
        while at > self._first:
            found = self._hold(at) if self.cache.knows(self._keys[at - 1]) else 0
            is_there[at - found : at] = [True] * found
            at -= found or 1
        for place, is_here in enumerate(is_there, 1):
            self._runs[place] = self._runs[place - 1] + 1 if is_here else 0

    def _hold(self, end: int, deadline: float | None = None) -> int:
        held = self.cache.hold(self._keys[self._first : end][::-1], deadline)
        self.held.parts.extend(held.parts)
        return held.num_pages

    def has(self, end: int) -> bool:
        """Whether all that is needed in front of this boundary is there."""
        return self._runs[end] >= min(self._reach, end)

    def fetch(self, end: int, deadline: float) -> bool:
        """Bring it from storage; whether it is there now."""
        if self.has(end):
            return True
        reach = min(self._reach, end)
        held = self.cache.hold(self._keys[end - reach : end][::-1], deadline)
        self.held.parts.extend(held.parts)
        if held.num_pages == reach:
            self._runs[end] = reach
        return self.has(end)


def fetch_last(ends: Sequence[Ends], boundaries: Sequence[int], deadline: float) -> None:
    """Bring the deepest of these boundaries from storage that all pools can have."""
    for end in reversed(boundaries):
        if all(each.fetch(end, deadline) for each in ends):
            return
