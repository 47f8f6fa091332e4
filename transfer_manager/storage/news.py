"""What has come to a store and gone, for one who wants to know at any time what it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from itertools import islice

from fastdeploy_cache.transfer_manager.storage.base import News, Storage
from fastdeploy_cache.transfer_manager.storage.keys import PROBE_OWNER, is_owned

_MOST_NAMES = 4096  # told at a time: 128 KiB


class NewsLog:
    """What one listener has yet to be told, name by name: the last of each counts. One thread at a time.

    The noise by which a store is tried is not told.
    """

    def __init__(self, listener: int, entries: Mapping[bytes, object]) -> None:
        """`entries`: by name, what is there; it changes with each `note`."""
        self.listener, self._entries = listener, entries
        self._first = list(entries)  # that was there at the begin, the next at the end
        self._first.reverse()
        self._came: OrderedDict[bytes, None] = OrderedDict()
        self._gone: OrderedDict[bytes, None] = OrderedDict()
        self._number = 0

    def note(self, name: bytes, *, is_there: bool) -> None:
        """An object has come, or gone."""
        if _is_told(name):
            newer, older = (self._came, self._gone) if is_there else (self._gone, self._came)
            older.pop(name, None)
            newer[name] = None

    def take(self) -> News | None:
        """What is told next, the objects that have gone first; None: nothing is new. On `MemoryError` it is told the
        next time."""
        if self._number and not (self._came or self._gone or self._first):
            return None
        gone = list(islice(self._gone, _MOST_NAMES))
        came = list(islice(self._came, _MOST_NAMES - len(gone)))
        num_first = min(len(self._first), _MOST_NAMES - len(gone) - len(came))
        first = [name for name in self._first[len(self._first) - num_first :] if name in self._entries]
        first = [name for name in reversed(first) if _is_told(name) and name not in self._came]
        has_more = len(gone) + len(came) + num_first < len(self._gone) + len(self._came) + len(self._first)
        news = News(self._number, b"".join(came + first), b"".join(gone), has_more)
        del self._first[len(self._first) - num_first :]
        for told, names in ((self._gone, gone), (self._came, came)):
            for name in names:
                del told[name]
        self._number += 1
        return news


def news_of(store: Storage, listener: int) -> News | None:
    """See `Storage.news`; None also of a store that has no such method."""
    ask: Callable[[int], News | None] | None = getattr(store, "news", None)
    return ask(listener) if ask is not None else None


def _is_told(name: bytes) -> bool:
    return not is_owned(name, PROBE_OWNER)
