"""What has come to a store and gone, for one who wants to know at any time what it has."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice

from fastdeploy_cache.transfer_manager.storage.base import News, Storage
from fastdeploy_cache.transfer_manager.storage.keys import PROBE_OWNER, is_owned, is_page
from fastdeploy_cache.transfer_manager.task import MOST_NEWS_BYTES

_MOST_NAMES = MOST_NEWS_BYTES // 32  # told at a time


class NewsLog:
    """What one listener has yet to be told, name by name: the last of each counts. One thread at a time.

    Pages of checkpoints are not told, and neither is the noise by which a store is tried.
    """

    def __init__(self, listener: int, names: Iterable[bytes]) -> None:
        """`names`: all that is there now."""
        self.listener = listener
        self._came = {name: None for name in names if _is_told(name)}
        self._gone: dict[bytes, None] = {}
        self._number = 0

    def note(self, name: bytes, *, is_there: bool) -> None:
        """An object has come, or gone."""
        if _is_told(name):
            newer, older = (self._came, self._gone) if is_there else (self._gone, self._came)
            older.pop(name, None)
            newer[name] = None

    def take(self) -> News | None:
        """What is told next, the objects that have gone first; None: nothing is new."""
        if self._number and not self._came and not self._gone:
            return None
        number, self._number = self._number, self._number + 1
        gone = _taken(self._gone, _MOST_NAMES)
        return News(number, b"".join(_taken(self._came, _MOST_NAMES - len(gone))), b"".join(gone))


def news_of(store: Storage, listener: int) -> News | None:
    """See `Storage.news`; None also of a store that has no such method."""
    ask: Callable[[int], News | None] | None = getattr(store, "news", None)
    return ask(listener) if ask is not None else None


def _is_told(name: bytes) -> bool:
    return not is_page(name) and not is_owned(name, PROBE_OWNER)


def _taken(names: dict[bytes, None], most: int) -> list[bytes]:
    taken = list(islice(names, most))
    for name in taken:
        del names[name]
    return taken
