"""Lists of tokens that engines give again and again, such as those of requests that wait for room."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from fastdeploy_cache.books.tokens import IS_NATIVE, PackedTokens, TokenIds, pack_plain

_FEWEST = 4096 if IS_NATIVE else 256  # tokens; fewer are packed in no time
_NUM_TIMES = 3  # most lists come once or twice: no copy is made of these
_MAX_CALLS = 1024  # what has not come in so many calls is forgotten


@dataclass(slots=True, eq=False)
class _Known:
    last_call: int
    num_times: int = 1  # 0: it comes with other tokens, or as other objects, and is not kept
    token_ids: list[int] | None = None  # a copy: the engine may write into its own
    packed: PackedTokens | None = None


class RepeatedLists:
    """Packs a list once, as long as it is the same. Any thread.

    A list belongs to a name and a length. What is remembered is a copy, and the copy's packed tokens are given only
    after every element has been compared with it. So an edited list costs time, and never gives other tokens' KV.
    """

    def __init__(self, max_tokens: int = 2**21) -> None:
        """Remember up to `max_tokens` tokens, at 12 bytes each, and 28 more where the engine has let go of them."""
        self._max_tokens = max_tokens
        self._known: dict[tuple[str, int], _Known] = {}  # the one that came last is the last
        self._num_calls = 0
        self.num_tokens = 0  # of the copies
        self._lock = threading.Lock()

    def packed(self, name: str | None, token_ids: TokenIds) -> PackedTokens | None:
        """The tokens of a list that `name` has given before; None where it is for the caller to pack."""
        if name is None or type(token_ids) is not list or len(token_ids) < _FEWEST:
            return None
        with self._lock:
            known = self._came((name, len(token_ids)))
            if known.packed is not None:
                if _are_same(known, token_ids):
                    return known.packed
                self._let_go(known)
                known.num_times = 0
            elif known.num_times == _NUM_TIMES and self.num_tokens + len(token_ids) <= self._max_tokens:
                copy = token_ids.copy()  # first, and packed from there: another thread may write into the list
                packed = pack_plain(copy)
                if packed is not None:  # nothing but plain integers, which nobody can change
                    known.token_ids, known.packed = copy, PackedTokens(packed)
                    self.num_tokens += len(copy)
            return known.packed

    def _came(self, key: tuple[str, int]) -> _Known:
        self._num_calls += 1
        known = self._known.pop(key, None)
        if known is None:
            known = _Known(self._num_calls)
        elif known.num_times:
            known.num_times = min(_NUM_TIMES, known.num_times + 1)
        known.last_call = self._num_calls
        self._known[key] = known
        while (oldest := next(iter(self._known.values()))).last_call <= self._num_calls - _MAX_CALLS:
            self._let_go(oldest)
            del self._known[next(iter(self._known))]
        return known

    def _let_go(self, known: _Known) -> None:
        self.num_tokens -= len(known.token_ids or ())
        known.token_ids = known.packed = None


def _are_same(known: _Known, token_ids: list[int]) -> bool:
    """Whether every token is equal. Of other objects that is not asked: it takes longer than packing them."""
    kept = known.token_ids
    assert kept is not None
    middle = len(kept) // 2
    is_alike = kept[0] is token_ids[0] and kept[middle] is token_ids[middle] and kept[-1] is token_ids[-1]
    try:
        return is_alike and kept == token_ids
    except (TypeError, ValueError, IndexError):  # there is something else in it now; whoever packs it names that
        return False
