"""A store that several processes have at the same time: `tests.rigs.shared_folder:SharedFolder`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, StorageStats, Written
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace


class SharedFolder:
    """A file for each block. Option: `path`."""

    needs_token_ids = False

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        self._folder, self._space = Path(options["path"]), space

    def _file(self, block_hash: bytes) -> Path:
        return self._folder / self._space.key(block_hash).replace(":", "-")

    def count_leading(self, blocks: Blocks) -> int:
        """See `Storage`."""
        return [*(self._file(each).exists() for each in blocks.hashes), False].index(False)

    def read(self, blocks: Blocks) -> int:
        """See `Storage`."""
        num_there = self.count_leading(blocks)
        for block_hash, buffer in zip(blocks.hashes[:num_there], blocks.buffers, strict=False):
            buffer[:] = self._file(block_hash).read_bytes()
        return num_there

    def write(self, blocks: Blocks) -> Written:
        """See `Storage`."""
        for block_hash, buffer in zip(blocks.hashes, blocks.buffers, strict=True):
            self._file(block_hash).write_bytes(bytes(buffer))
        return Written(len(blocks.hashes), sum(map(len, blocks.buffers)))

    def remove(self, hashes: Sequence[bytes]) -> int:
        """See `Storage`."""
        there = [each for each in hashes if self._file(each).exists()]
        for each in there:
            self._file(each).unlink()
        return len(there)

    def clear(self, weights_id: str) -> int:
        """See `Storage`."""
        return 0

    def stats(self) -> StorageStats:
        """See `Storage`."""
        return StorageStats()

    def close(self) -> None:
        """See `Storage`."""
