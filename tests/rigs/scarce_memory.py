"""Memory that is left a few times, or not at all."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest

from fastdeploy_cache.books.block_pool import BlockPool, Owner


def no_memory(*_: object) -> NoReturn:
    """What it stands for gets none."""
    raise MemoryError


class TightIds:
    """An array of ids that gets memory a few times more: for bytes at its end, or for a part of it, which is a copy. To
    cut it where it lies needs none."""

    def __init__(self, ids: array[int], num_left: int = 0) -> None:
        """`num_left`: how often it gets memory."""
        self.ids, self._num_left = ids, num_left

    def __len__(self) -> int:
        return len(self.ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __getitem__(self, part: slice) -> array[int]:
        self._take_memory()
        return self.ids[part]

    def __delitem__(self, part: slice) -> None:
        del self.ids[part]

    def frombytes(self, packed: bytes) -> None:
        """More ids behind these."""
        self._take_memory()
        self.ids.frombytes(packed)

    def _take_memory(self) -> None:
        if not self._num_left:
            raise MemoryError
        self._num_left -= 1


def take_tight_ids(pool: BlockPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a pool take such ids back, which its table could not read."""
    free = pool.free

    def take(ids: Any, giver: Owner) -> None:
        free(ids.ids if isinstance(ids, TightIds) else ids, giver)

    monkeypatch.setattr(pool, "free", take)
