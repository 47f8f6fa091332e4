"""A dict in pieces: one of a million keys is copied whole whenever it has to grow, which takes tens of milliseconds."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Generic, TypeVar, cast
from zlib import crc32

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
SMALL = 2730  # entries of a plain dict: its next growth would be one to 8,192 places
_LOAD = 320  # entries of a piece: from half as many to twice as many


class LargeDict(Generic[K, V]):
    """Pieces by the last bits of the keys' places. When a key comes, at most one piece is split (linear hashing): the
    first of those that have not been since their number was a power of two. Keys are in no order."""

    __slots__ = ("_mask", "_num", "_num_pieces", "_pieces", "_place")

    def __init__(self, entries: dict[K, V], place: Callable[[K], int]) -> None:
        """Takes over a plain dict. `place` gives a number for a key that spreads well.

        Whoever walks over the entries gives one that is the same in every process, as their order follows from it.
        Python's own hash of bytes is another one in each.
        """
        self._place = place
        self._pieces = [entries]  # by the last bits of a place: a power of two; those not split yet are there twice
        self._mask = 0  # these bits
        self._num_pieces = 1  # each once: they are the first ones
        self._num = len(entries)

    def __len__(self) -> int:
        return self._num

    def __getitem__(self, key: K) -> V:
        return self._pieces[self._place(key) & self._mask][key]

    def __setitem__(self, key: K, value: V) -> None:
        piece = self._pieces[self._place(key) & self._mask]
        num_before = len(piece)
        piece[key] = value
        self._num += len(piece) - num_before
        if self._num > _LOAD * self._num_pieces:
            with contextlib.suppress(MemoryError):  # then a larger piece does
                self._split()

    def get(self, key: K) -> V | None:
        """What stands under a key; None stands for nothing."""
        return self._pieces[self._place(key) & self._mask].get(key)

    def pop(self, key: K, default: V | None = None) -> V | None:
        """Take an entry out; returns what stood under the key, or the default."""
        piece = self._pieces[self._place(key) & self._mask]
        num_before = len(piece)
        value = piece.pop(key, default)
        self._num += len(piece) - num_before
        return value

    def popitem(self) -> tuple[K, V]:
        """Take any entry out; raises `KeyError` where there is none."""
        pieces = self._pieces
        while not (last := pieces[self._num_pieces - 1]) and self._mask:
            self._undo_split()
        entry = last.popitem()
        self._num -= 1
        return entry

    def values(self) -> Iterator[V]:
        """Nothing may come or go meanwhile."""
        for piece in self._pieces[: self._num_pieces]:
            yield from piece.values()

    def items(self) -> Iterator[tuple[K, V]]:
        """Keys and values; nothing may come or go meanwhile."""
        for piece in self._pieces[: self._num_pieces]:
            yield from piece.items()

    @property
    def num_pieces(self) -> int:
        """So many numbers in a row name all of its entries."""
        return self._num_pieces

    def piece(self, number: int) -> dict[K, V]:
        """Some of its entries: each is in one of the pieces that so many numbers in a row name."""
        return self._pieces[number % self._num_pieces]

    def _split(self) -> None:
        pieces, kept, moved = self._pieces, dict[K, V](), dict[K, V]()
        if self._num_pieces == len(pieces):
            pieces += pieces
            self._mask = len(pieces) - 1
        bit = len(pieces) // 2
        place = self._num_pieces - bit
        for key, value in pieces[place].items():
            (moved if self._place(key) & bit else kept)[key] = value
        pieces[place] = kept
        pieces[self._num_pieces] = moved
        self._num_pieces += 1

    def _undo_split(self) -> None:
        """The last piece is empty: the one that it was split from has all that both had."""
        pieces, bit = self._pieces, len(self._pieces) // 2
        self._num_pieces -= 1
        pieces[self._num_pieces] = pieces[self._num_pieces - bit]
        if self._num_pieces == bit:
            del pieces[bit:]
            self._mask = bit - 1


def place_of_name(name: str) -> int:
    """The place of a key that is a string."""
    return crc32(name.encode())


def put(
    entries: dict[K, V] | LargeDict[K, V], key: K, value: V, place: Callable[[K], int]
) -> dict[K, V] | LargeDict[K, V]:
    """Add or replace an entry; returns what has them all now. `place`: see `LargeDict`."""
    entries[key] = value
    if type(entries) is dict and len(entries) > SMALL:
        with contextlib.suppress(MemoryError):
            return LargeDict(entries, place)
    return entries


def pieces(entries: Callable[[], Mapping[K, V] | LargeDict[K, V]]) -> Iterator[list[V]]:
    """All values, some at a time, between which others may come and go; one that stays is among them, maybe twice.

    `entries` is asked again for each piece, as a plain dict may have become a large one. A piece that is undone puts
    what it had into one that was seen already: then all are gone through once more.
    """
    number = most = 0
    while type(found := entries()) is LargeDict:
        most = max(most, found.num_pieces)
        if number >= found.num_pieces:
            if found.num_pieces == most:
                return
            number, most = 0, found.num_pieces
        yield list(found.piece(number).values())
        number += 1
    yield list(cast("Mapping[K, V]", found).values())


def piece_of(entries: dict[K, V] | LargeDict[K, V], number: int) -> dict[K, V]:
    """Some of the entries, the next ones for each next number; only to look at."""
    return entries if type(entries) is dict else cast("LargeDict[K, V]", entries).piece(number)
