"""What every store below the CPU tier does, and the checksum that its objects carry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import xxhash

from fastdeploy_cache.errors import StorageError
from fastdeploy_cache.transfer_manager.storage.keys import MARK_BYTES, KeySpace

Segment = np.ndarray[Any, np.dtype[np.uint8]]  # a rank's CPU blocks: [num_blocks, object_bytes]
SEAL_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """Blocks of one prompt in its order, each with its memory: what one call to a store is about.

    Attributes:
        hashes: 32 bytes each; the names of the objects.
        buffers: `object_bytes` bytes each, in the segment that the store was opened with; empty for calls that move no
            bytes.
        addresses: of the buffers, for stores that take pointers.
        token_ids: int32, the prompt's tokens up to the end of the last block; for stores with `needs_token_ids` only.
        priority: of the request, 0 to 100, where it has one.
        owner: whose they are: see `keys.owner_mark`.
        above: where owners have shares of the store, the names of the blocks before them: what is there of these is
            used with them, and does not go for them.
    """

    hashes: Sequence[bytes]
    buffers: Sequence[memoryview] = ()
    addresses: Sequence[int] = ()
    token_ids: np.ndarray[Any, np.dtype[np.int32]] | None = None
    priority: float | None = None
    owner: bytes = b""
    above: Sequence[bytes] = ()


class Written(NamedTuple):
    """What a write came to: how many leading blocks the store has now, and how many bytes it had to write for that."""

    num_leading: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True)
class StorageStats:
    """A store as far as it knows itself. Counts of what happened are since it was opened; None: it cannot tell."""

    num_objects: int | None = None
    num_bytes: int | None = None
    capacity_bytes: int | None = None
    num_evicted: int = 0
    num_declined: int = 0  # writes that the admission filter kept out
    num_damaged: int = 0  # objects whose bytes were not those that were written; they have been removed
    num_other_weights: int = 0  # other names of weights with blocks that are alike in all else, when it was opened
    num_full_disks: int = 0  # now: 1 where it writes less than it should, as its disk has no room


class News(NamedTuple):
    """What has come to a store and gone: names of objects, joined. `number` counts; 0: nothing was told before.
    `has_more`: there is more to be told now."""

    number: int
    came: bytes
    gone: bytes
    has_more: bool


class Storage(Protocol):
    """Keeps blocks by their hashes, within one key space. Opened as `Store(options, space, segment)`.

    Calls may come from two threads at a time: one reads (`count_leading`, `read`), one writes (`write`, `remove`,
    `clear`); `stats` from either. Any call may raise `StorageError` (try again later) or `StorageGoneError` (open it
    anew). Whoever calls holds every call to a deadline by ending the process, so a store needs no own for safety, but
    should have one below it where it can.
    """

    needs_token_ids: bool

    def count_leading(self, blocks: Blocks) -> int:
        """How many of the blocks, counted from the first, are there. May be wrong; `read` is not."""
        ...

    def find(self, hashes: Sequence[bytes]) -> Sequence[bool]:
        """Say of each object whether it is there, in one go. May be wrong, as above. A store that has no such method
        is asked for one after the other by `count_leading`."""
        ...

    def read(self, blocks: Blocks) -> int:
        """Fill the buffers. Returns how many, counted from the first, now hold exactly what was written under their
        hashes; what the buffers behind hold is undefined."""
        ...

    def write(self, blocks: Blocks) -> Written:
        """Store what is not there yet. An object is whole or absent, whatever happens meanwhile."""
        ...

    def remove(self, hashes: Sequence[bytes]) -> int:
        """Forget objects; returns how many were there."""
        ...

    def clear(self, weights_id: str) -> int:
        """Forget all objects of these weights, in every space; returns how many, as far as it can tell."""
        ...

    def remove_owned(self, weights_id: str, owner: bytes) -> int:
        """Remove all objects of these weights, in every space, that have this mark in their names
        (`keys.owner_mark`), and overwrite their bytes where the store can; returns how many. A store that has no such
        method keeps what it has of a namespace that is forgotten."""
        ...

    def news(self, listener: int) -> News | None:
        """What has come and gone since this listener asked last; with a higher number than any before, all that there
        is. Any thread. A store that cannot say what it has at any time, as others write to it, has no such method."""
        ...

    def stats(self) -> StorageStats:
        """See `StorageStats`. Cheap."""
        ...

    def close(self) -> None:
        """Make durable what is not, and give everything back."""
        ...


class OpenStorage(Protocol):
    """How a store is opened: a class with this constructor, built in or named `module:Class`."""

    def __call__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> Storage:
        """Open it. Raises `StorageRefusedError` for what the user has to change, `StorageError` for what may pass."""
        ...


def seal(block_hash: bytes, data: memoryview | bytes) -> bytes:
    """The checksum of an object: XXH3-64 of its bytes, seeded by its hash: one object never passes for another."""
    return xxhash.xxh3_64_digest(data, seed=_seed(block_hash))


def new_seal(block_hash: bytes) -> xxhash.xxh3_64:
    """The same piece by piece: `update` with each, then `digest`."""
    return xxhash.xxh3_64(seed=_seed(block_hash))


def _seed(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[:8], "little")


def find_each(store: Storage, names: Sequence[bytes]) -> Iterable[bool]:
    """Which of these a store has, one at a time where it has no `find`."""
    find: Callable[[Sequence[bytes]], Iterable[bool]] | None = getattr(store, "find", None)
    return find(names) if find is not None else (store.count_leading(Blocks(hashes=[name])) == 1 for name in names)


def remove_owned(store: Storage, weights_id: str, owner: bytes) -> int:
    """See `Storage.remove_owned`. Raises `StorageError` for a store that has none."""
    if not hasattr(store, "remove_owned") or len(owner) != MARK_BYTES:
        raise StorageError("this store has no `remove_owned`: what it has of a namespace stays")
    return store.remove_owned(weights_id, owner)
