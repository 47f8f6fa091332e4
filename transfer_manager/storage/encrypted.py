"""Objects that are encrypted before a store gets them: AES-GCM, by a key of whoever owns them."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import (
    Blocks,
    News,
    Segment,
    StorageStats,
    Written,
    find_each,
    remove_owned,
)
from fastdeploy_cache.transfer_manager.storage.config import ENCRYPTED_BYTES, NONCE_BYTES
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.storage.news import news_of
from fastdeploy_cache.transfer_manager.storage.tenant_keys import TenantKeys, read_keys

logger = logging.getLogger(__name__)

_STAGING_BYTES: Final = 16 * 2**20  # of each direction, at most
_MOST_WRONG: Final = 3  # objects of an owner that its key does not open, and none that it does: then none is asked for
_QUIET_SECONDS: Final = 60.0  # and then tried again: a key may be right for what comes later
_MOST_OWNERS: Final = 1024  # of whom that is remembered


@dataclasses.dataclass
class _Wrong:
    """What no key of an owner's has opened lately: names of objects, and till when none is asked for."""

    names: set[bytes] = dataclasses.field(default_factory=set)
    quiet_until: float = 0.0


def check_encryption(keys_file: str) -> None:
    """Try what can be told without the store. Raises `StorageRefusedError`: the package `cryptography` is missing, or
    the keys cannot be used (see `read_keys`)."""
    _aes_gcm()
    read_keys(keys_file)


def _aes_gcm() -> tuple[Any, type[Exception]]:
    """The cipher, and what it raises for a wrong key."""
    try:
        from cryptography.exceptions import InvalidTag
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        text = f"storage.keys_file needs pip install 'fastdeploy-cache[encryption]': {error}"
        raise StorageRefusedError(text) from error
    return AESGCM, InvalidTag


class EncryptedStorage:
    """See `Storage`. An object is its nonce, its bytes under AES-GCM, and the tag, which also covers its name: one
    object never passes for another. It lies in a key space of its own, so that objects that are not encrypted are never
    met.

    What an owner's key does not open is a miss, and stays where it is: another instance may have the right key. An
    owner without a key has nothing stored, and finds nothing.
    """

    def __init__(
        self,
        kind: str,
        options: Mapping[str, Any],
        space: KeySpace,
        segment: Segment,
        keys: TenantKeys,
        *,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """Open a store of this kind. `segment` says how large the objects are that callers give and get.

        Raises:
            StorageRefusedError: the package `cryptography` is missing, or the store is refused.
            StorageError: it cannot be reached now.
        """
        self._cipher, self._wrong_key = _aes_gcm()
        size = segment.shape[1] + ENCRYPTED_BYTES
        self._batch_blocks = max(1, min(len(segment), _STAGING_BYTES // size))
        self._staging = np.empty((2 * self._batch_blocks, size), np.uint8)  # of reads, and of writes
        self._keys = keys
        self._space = msgspec.structs.replace(space, layout=f"AES-GCM of {space.layout}", object_bytes=size)
        self._store = open_storage(kind, options, self._space, self._staging)
        self.needs_token_ids = self._store.needs_token_ids
        self._clock, self._num_wrong, self._num_declined = clock, 0, 0
        self._wrong_by_owner: OrderedDict[bytes, _Wrong] = OrderedDict()

    def count_leading(self, blocks: Blocks) -> int:
        """See `Storage`. Nothing, where the owner has no key, or one that has opened nothing lately."""
        return self._store.count_leading(blocks) if self._may_read(blocks.owner) else 0

    def find(self, hashes: Sequence[bytes]) -> Sequence[bool]:
        """See `Storage`."""
        return list(find_each(self._store, hashes))

    def _may_read(self, owner: bytes) -> bool:
        wrong = self._wrong_by_owner.get(owner)
        return self._keys.has(owner) and (wrong is None or self._clock.now() >= wrong.quiet_until)

    def read(self, blocks: Blocks) -> int:
        """See `Storage`."""
        key = self._keys.of(blocks.owner)
        if key is None:
            return 0
        cipher, num_read = self._cipher(key), 0
        for start, rows in self._batches(blocks, self._staging[: self._batch_blocks]):
            num_here = self._store.read(self._part(blocks, start, rows))
            for row, buffer, name in zip(rows[:num_here], blocks.buffers[start:], blocks.hashes[start:], strict=False):
                data = memoryview(row)
                try:
                    buffer[:] = cipher.decrypt(data[:NONCE_BYTES], data[NONCE_BYTES:], self._about(name))
                except self._wrong_key:
                    self._note_wrong(blocks.owner, name)
                    return num_read
                num_read += 1
                self._wrong_by_owner.pop(blocks.owner, None)  # the key is right, whatever becomes of others
            if num_here < len(rows):
                break
        return num_read

    def _note_wrong(self, owner: bytes, name: bytes) -> None:
        self._num_wrong += 1
        wrong = self._wrong_by_owner.setdefault(owner, _Wrong())
        if len(wrong.names) < _MOST_WRONG:
            wrong.names.add(name)
        if len(wrong.names) == _MOST_WRONG:
            wrong.quiet_until = self._clock.now() + _QUIET_SECONDS
            logger.warning("event=storage_key_opens_nothing owner=%s remedy='see storage.keys_file'", owner.hex())
        while len(self._wrong_by_owner) > _MOST_OWNERS:
            self._wrong_by_owner.popitem(last=False)

    def write(self, blocks: Blocks) -> Written:
        """See `Storage`."""
        key, num_leading, num_bytes = self._keys.of(blocks.owner), 0, 0
        if key is None:
            self._num_declined += len(blocks.hashes)
            return Written(0, 0)
        cipher = self._cipher(key)
        for start, rows in self._batches(blocks, self._staging[self._batch_blocks :]):
            for row, buffer, name in zip(rows, blocks.buffers[start:], blocks.hashes[start:], strict=False):
                nonce = SYSTEM_CLOCK.random_bytes(NONCE_BYTES)
                row[:NONCE_BYTES] = np.frombuffer(nonce, np.uint8)
                row[NONCE_BYTES:] = np.frombuffer(cipher.encrypt(nonce, buffer, self._about(name)), np.uint8)
            written = self._store.write(self._part(blocks, start, rows))
            num_leading, num_bytes = num_leading + written.num_leading, num_bytes + written.num_bytes
            if written.num_leading < len(rows):
                break
        return Written(num_leading, num_bytes)

    def _batches(self, blocks: Blocks, staging: Segment) -> Iterator[tuple[int, Segment]]:
        for start in range(0, len(blocks.hashes), self._batch_blocks):
            yield start, staging[: len(blocks.hashes) - start]

    def _part(self, blocks: Blocks, start: int, rows: Segment) -> Blocks:
        tokens, num_behind = blocks.token_ids, len(blocks.hashes) - start - len(rows)
        if tokens is not None and num_behind:
            tokens = tokens[: len(tokens) - num_behind * self._space.block_size]
        return dataclasses.replace(
            blocks,
            token_ids=tokens,
            hashes=blocks.hashes[start : start + len(rows)],
            above=[*blocks.above, *blocks.hashes[:start]],
            buffers=[memoryview(row) for row in rows],
            addresses=[row.ctypes.data for row in rows],
        )

    def _about(self, name: bytes) -> bytes:
        """What the tag covers beside the bytes."""
        return bytes.fromhex(self._space.digest) + name

    def remove(self, hashes: Sequence[bytes]) -> int:
        """See `Storage`."""
        return self._store.remove(hashes)

    def remove_owned(self, weights_id: str, owner: bytes) -> int:
        """See `Storage`."""
        return remove_owned(self._store, weights_id, owner)

    def clear(self, weights_id: str) -> int:
        """See `Storage`."""
        return self._store.clear(weights_id)

    def news(self, listener: int) -> News | None:
        """See `Storage`."""
        return news_of(self._store, listener)

    def stats(self) -> StorageStats:
        """See `StorageStats`. What a key did not open counts as damaged, and what had no key as declined."""
        stats = self._store.stats()
        num_damaged, num_declined = stats.num_damaged + self._num_wrong, stats.num_declined + self._num_declined
        return dataclasses.replace(stats, num_damaged=num_damaged, num_declined=num_declined)

    def close(self) -> None:
        """See `Storage`."""
        self._store.close()
