"""Checkpoints that come from storage: the full KV in front of one first, its image last. Under the lock."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.books.run_notes import Stored
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.transfer_manager.storage.keys import page_names

_STORED = Stored(1, 1)
_NOTHING = object()


class CheckpointReads:
    """Nothing behind the deepest checkpoint of a path may stay that nobody holds. So a prefetch holds what has come
    until its checkpoint has come, too, or will not; then what nobody can use goes."""

    def __init__(self, books: Books, rows: RowBooks) -> None:
        self._tree, self._checkpoints = books.tree, rows.checkpoints
        self._holding: dict[StoragePrefetch, None] = {}

    @property
    def pins(self) -> Iterator[Pin]:
        """What is held of runs."""
        return (each.pin for each in self._holding if each.pin is not None)

    @property
    def held(self) -> Iterator[Checkpoint]:
        """Checkpoints that are held."""
        return (each.checkpoint for each in self._holding if each.checkpoint is not None)

    def num_pages(self, prefetch: StoragePrefetch) -> int:
        """CPU blocks that the image behind all that storage has of it takes."""
        return self._checkpoints.sizes.num_pages(prefetch.first + prefetch.num_present)

    def names(self, prefetch: StoragePrefetch) -> bytes:
        """The names of its pages, joined."""
        last = prefetch.hashes[(prefetch.num_present - 1) * HASH_BYTES : prefetch.num_present * HASH_BYTES]
        return b"".join(page_names(last, self.num_pages(prefetch)))

    def hold(self, prefetch: StoragePrefetch) -> bool:
        """Hold what has come of its full KV; whether it is all there. What gets no memory goes with `let_go`."""
        num_blocks = prefetch.first + prefetch.num_landed
        self._holding[prefetch] = None
        path, num_found = self._tree.find(prefetch.namespace, prefetch.keys, num_blocks)
        prefetch.pin = self._tree.move_pin(prefetch.pin, *self._tree.place(path, min(num_found, num_blocks)))
        return num_found == num_blocks

    def land(self, prefetch: StoragePrefetch, pages: array[int]) -> bool:
        """Its image is in these pages of a task's; whether a checkpoint has them now, which is held."""
        boundary = prefetch.first + prefetch.num_present
        path, num_found = self._tree.find(prefetch.namespace, prefetch.keys, boundary)
        if num_found < boundary or prefetch.pin is None:
            return False
        run, end = self._tree.place(path, boundary)
        assert run is not None
        restored = prefetch.checkpoint = self._checkpoints.restore(run, end, boundary, pages)
        prefetch.has_checkpoint = True  # or another one has it, that was made meanwhile
        if restored is not None:
            restored.stored = _STORED
        return restored is not None

    def let_go(self, prefetch: StoragePrefetch) -> None:
        """It holds nothing any more."""
        if prefetch.checkpoint is not None:
            self._checkpoints.unpin(prefetch.checkpoint)  # first: its path is pinned as long as it is
            prefetch.checkpoint = None
        prefetch.pin = self._tree.move_pin(prefetch.pin, None, 0)
        if self._holding.pop(prefetch, _NOTHING) is None and prefetch.epoch == self._tree.epoch:
            with contextlib.suppress(MemoryError):  # what could not be held
                path, _ = self._tree.find(prefetch.namespace, prefetch.keys, prefetch.first + prefetch.num_wanted)
                if path and self._tree.residency.trim is not None:
                    self._tree.residency.trim(path[-1], Loss.TRIMMED)
