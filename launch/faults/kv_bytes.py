"""What each token leaves in the KV arrays: it follows from the tokens up to it, so every block can be compared."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

_MOST_ROWS = 50_000
Rows = np.ndarray[Any, np.dtype[np.uint8]]


class Content:
    """What tokens leave behind. `space` parts a prefix from the same tokens of others: by namespace and weights."""

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes
        self._known: dict[tuple[str, int, tuple[int, ...]], Rows] = {}

    def rows(self, space: str, rank: int, tokens: Sequence[int]) -> Rows:
        """uint8 [tokens, bytes]."""
        key = space, rank, tuple(tokens)
        found = self._known.get(key)
        if found is None:
            if len(self._known) * len(tokens) > _MOST_ROWS:
                self._known.clear()
            found = self._known[key] = self._new_rows(space, rank, tokens)
        return found

    def _new_rows(self, space: str, rank: int, tokens: Sequence[int]) -> Rows:
        chain, rows = hashlib.sha256(f"{space}|{rank}|".encode()), bytearray()
        for token in tokens:
            chain.update(token.to_bytes(4, "little"))
            rows += hashlib.shake_128(chain.digest()).digest(self._row_bytes)
        return np.frombuffer(bytes(rows), np.uint8).reshape(len(tokens), self._row_bytes)


class KVBytes:
    """The KV arrays of one rank, as its model reads and writes them: [blocks, tokens of a block, ...] by layer."""

    def __init__(self, views: Sequence[dict[str, np.ndarray[Any, np.dtype[Any]]]], block_size: int) -> None:
        arrays = [array for parts in views for array in parts.values()]
        self.arrays = [array.view(np.uint8).reshape(len(array), block_size, -1) for array in arrays]
        self._block_size, self._num_parts = block_size, len(views[0])
        self.row_bytes = sum(array.shape[2] for array in self.arrays)

    def _pieces(self, table: Sequence[int], first: int, end: int) -> Iterator[tuple[Any, Any, slice]]:
        positions = np.arange(first, end)
        blocks, offsets = np.asarray(table, np.intp)[positions // self._block_size], positions % self._block_size
        start = 0
        for array in self.arrays:
            width = array.shape[2]
            yield array, (blocks, offsets), slice(start, start + width)
            start += width

    def write(self, rows: Rows, table: Sequence[int], first: int) -> Iterator[int]:
        """Tokens from `first` on are computed, layer by layer; yields how many layers are."""
        for number, (array, at, columns) in enumerate(self._pieces(table, first, len(rows)), 1):
            array[at] = rows[first:, columns]
            if not number % self._num_parts:
                yield number // self._num_parts

    def wrong(self, rows: Rows, table: Sequence[int]) -> list[int]:
        """The positions of tokens that are not what they should be."""
        found: set[int] = set()
        for array, at, columns in self._pieces(table, 0, len(rows)):
            found.update(np.flatnonzero((array[at] != rows[:, columns]).any(axis=1)).tolist())
        return sorted(found)
