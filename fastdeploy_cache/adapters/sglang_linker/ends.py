"""Boundaries behind which a window, or a state, is in the CPU tier. One thread."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.adapters.sglang_linker.page_cache import HeldPages, PageCache

_MOST_PAGES = 4096  # that are looked at, from the last on
_MOST_GUESSES = 32  # pages in front of a window that storage may have from one of them on


class Ends:
    """The boundaries of one pool, in front of the full pages that were found. What it finds is held."""

    def __init__(self, cache: PageCache, keys: Sequence[bytes], reach: int) -> None:
        """`reach`: pages that are needed in front of a boundary, or as many as there are."""
        self.cache, self.held = cache, HeldPages([])
        self._keys, self._reach = keys, reach
        self._is_there = [False] * len(keys)
        self._runs = [0] * (len(keys) + 1)  # behind each page, how many in a row end there
        self._is_fetched = False

    def find(self) -> None:
        """Look at the pages that are known here: one look for a chain, not for a page."""
        at = max(0, len(self._keys) - _MOST_PAGES)
        while at < len(self._keys):
            at += (self._hold(at, len(self._keys)) if self.cache.knows(self._keys[at]) else 0) or 1
        self._count()

    def has(self, end: int) -> bool:
        """Whether all that is needed in front of this boundary is there."""
        return self._runs[end] >= min(self._reach, end)

    def fetch(self, end: int, deadline: float) -> bool:
        """Bring it from storage; whether it is there now."""
        if self.has(end):
            return True
        if self.cache.is_state:
            self._hold(end - 1, end, deadline)
        elif not self._is_fetched:
            self._is_fetched = True
            self._fetch_chains(deadline)
        self._count()
        return self.has(end)

    def _fetch_chains(self, deadline: float) -> None:
        """Bring those of windows. Where one begins is not told: it does at the first page, or behind another, or else
        not far in front of the last window."""
        at, num = 0, len(self._keys)
        while at < num:
            found = self._hold(at, num, deadline)
            at = at + found if found else max(at + 1, num - self._reach - _MOST_GUESSES)

    def _hold(self, first: int, end: int, deadline: float | None = None) -> int:
        held = self.cache.hold(self._keys[first:end], deadline)
        self.held.parts.extend(held.parts)
        self._is_there[first : first + held.num_pages] = [True] * held.num_pages
        return held.num_pages

    def _count(self) -> None:
        for place, is_here in enumerate(self._is_there, 1):
            self._runs[place] = self._runs[place - 1] + 1 if is_here else 0


def fetch_last(ends: Sequence[Ends], boundaries: Sequence[int], deadline: float) -> None:
    """Bring the deepest of these boundaries from storage that all pools can have."""
    for end in reversed(boundaries):
        if all(each.fetch(end, deadline) for each in ends):
            return
