"""What a look-up has promised is kept in the CPU tier until its load, or until it is too old. One thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fastdeploy_cache.adapters.sglang_linker.page_cache import PageCache
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

_MOST, _MOST_SHARE, _SECONDS = 256, 0.25, 30.0

Kept = Sequence[tuple[PageCache, Sequence[PinnedPrefix]]]


class Promises:
    """What is promised, by request. SGLang does not say that it has given one up before its load, so that they end by
    themselves."""

    def __init__(self, most_pages: int) -> None:
        """`most_pages`: of the CPU tier of keys and values, of which promises hold a quarter at most."""
        self._most_pages = int(most_pages * _MOST_SHARE)
        self._kept: OrderedDict[str, tuple[Kept, int, float]] = OrderedDict()
        self._num_pages = 0

    def keep(self, rid: str, kept: Kept, num_pages: int) -> None:
        """This was promised to a request, instead of what was before."""
        self.end(rid)
        self._kept[rid] = kept, num_pages, SYSTEM_CLOCK.now()
        self._num_pages += num_pages
        self.end_old()

    def end_old(self) -> None:
        """Those go that are too old or, the oldest first, too many."""
        while self._kept:
            rid, (_, _, since) = next(iter(self._kept.items()))
            is_much = len(self._kept) > _MOST or self._num_pages > self._most_pages
            if not is_much and SYSTEM_CLOCK.now() - since < _SECONDS:
                return
            self.end(rid)

    def end(self, rid: str) -> None:
        """It is loaded now, or given up."""
        kept, num_pages, _ = self._kept.pop(rid, ((), 0, 0.0))
        self._num_pages -= num_pages
        for cache, pinned in kept:
            cache.let_go(pinned)

    def end_all(self) -> None:
        """Nothing is promised."""
        for rid in list(self._kept):
            self.end(rid)
