"""A store in memory, for tests: `tests.rigs.memory_storage:MemoryStorage`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, StorageStats, Written, seal
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace, owned


class MemoryStorage:
    """Keeps seal and bytes in a dictionary.

    Options: `needs_token_ids` ("1": it refuses calls without them), and `objects`: the dictionary itself, for stores
    that share it or tests that look into it.
    """

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        unknown = set(options) - {"needs_token_ids", "objects"}
        if unknown:
            raise StorageRefusedError(f"MemoryStorage knows no option {sorted(unknown)}")
        self.needs_token_ids = bool(int(options.get("needs_token_ids", 0)))
        self.objects: dict[str, bytes] = options.get("objects", {})
        self._space = space
        self._num_damaged = 0

    def count_leading(self, blocks: Blocks) -> int:
        """See `Storage`."""
        self._check_token_ids(blocks)
        return [*self.find(blocks.hashes), False].index(False)

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """See `Storage`."""
        return [self._space.key(block_hash) in self.objects for block_hash in hashes]

    def read(self, blocks: Blocks) -> int:
        """See `Storage`."""
        self._check_token_ids(blocks)
        for index, (block_hash, buffer) in enumerate(zip(blocks.hashes, blocks.buffers, strict=True)):
            value = self.objects.get(self._space.key(block_hash))
            if value is None:
                return index
            if len(value) != 8 + len(buffer) or value[:8] != seal(block_hash, value[8:]):
                self._num_damaged += 1
                self.remove([block_hash])
                return index
            buffer[:] = value[8:]
        return len(blocks.hashes)

    def write(self, blocks: Blocks) -> Written:
        """See `Storage`."""
        self._check_token_ids(blocks)
        num_bytes = 0
        for block_hash, buffer in zip(blocks.hashes, blocks.buffers, strict=True):
            key, data = self._space.key(block_hash), bytes(buffer)
            if len(self.objects.get(key, b"")) != 8 + len(data):
                self.objects[key] = seal(block_hash, data) + data
                num_bytes += 8 + len(data)
        return Written(len(blocks.hashes), num_bytes)

    def remove(self, hashes: Sequence[bytes]) -> int:
        """See `Storage`."""
        return sum(self.objects.pop(self._space.key(block_hash), None) is not None for block_hash in hashes)

    def clear(self, weights_id: str) -> int:
        """See `Storage`."""
        digest = msgspec.structs.replace(self._space, weights_id=weights_id).weights_digest
        keys = [key for key in self.objects if key.split(":")[1] == digest]
        return sum(self.objects.pop(key, None) is not None for key in keys)

    def remove_owned(self, weights_id: str, owner: bytes) -> int:
        """See `Storage`."""
        digest = msgspec.structs.replace(self._space, weights_id=weights_id).weights_digest
        names = {key: bytes.fromhex(key.split(":")[3]) for key in self.objects if key.split(":")[1] == digest}
        mine = [key for key, name in names.items() if owned(name, owner) == name]
        return sum(self.objects.pop(key, None) is not None for key in mine)

    def stats(self) -> StorageStats:
        """See `StorageStats`."""
        return StorageStats(num_objects=len(self.objects), num_damaged=self._num_damaged)

    def close(self) -> None:
        """Nothing to give back."""

    def _check_token_ids(self, blocks: Blocks) -> None:
        if self.needs_token_ids and blocks.token_ids is None:
            raise AssertionError("this store needs token ids, and was called without")
