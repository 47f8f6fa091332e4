"""What a look-up has promised is kept in the CPU tier until its load, or until it is too old. One thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from fastdeploy_cache.adapters.sglang_linker.page_cache import HeldPages, PageCache
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK

MOST_PROMISES, MOST_SHARE, MOST_SECONDS = 256, 0.5, 30.0  # of one pool's CPU tier

Held = Sequence[tuple[PageCache, HeldPages]]


class Promises:
    """What is promised, by request. SGLang does not say that it has given one up before its load, so that they end by
    themselves."""

    def __init__(self, caches: Sequence[PageCache]) -> None:
        self._caches = caches
        self._held: OrderedDict[str, tuple[Held, float]] = OrderedDict()

    def keep(self, rid: str, held: Held) -> None:
        """This is promised to a request, instead of what was before. Others end for it, and never itself."""
        self.end(rid)
        self._held[rid] = held, SYSTEM_CLOCK.now()
        while len(self._held) > 1 and self._are_many():
            self.end(next(iter(self._held)))

    def _are_many(self) -> bool:
        return len(self._held) > MOST_PROMISES or any(cache.pinned_share > MOST_SHARE for cache in self._caches)

    def held(self, rid: str, cache: PageCache) -> list[HeldPages]:
        """What of a cache's is promised to a request."""
        return [pages for of, pages in self._held.get(rid, ((), 0.0))[0] if of is cache]

    def end_old(self) -> None:
        """Those that are too old end."""
        while self._held:
            rid, (_, since) = next(iter(self._held.items()))
            if SYSTEM_CLOCK.now() - since < MOST_SECONDS:
                return
            self.end(rid)

    def end(self, rid: str) -> None:
        """It is loaded now, or given up."""
        held, _ = self._held.pop(rid, ((), 0.0))
        for cache, pages in held:
            cache.let_go(pages)

    def end_all(self) -> None:
        """Nothing is promised."""
        for rid in list(self._held):
            self.end(rid)
