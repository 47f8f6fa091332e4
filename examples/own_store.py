"""A store of one's own below the CPU tier: a class with eight small methods, here a folder with a file for each block.

The cache runs the store in a process of its own, behind a deadline and a circuit breaker: it may be slow, hang or
crash, which costs hits and nothing else. What it says of existence is not believed either. But what `read` says it has
read is used, so each object carries a seal, as here, and `space.key(hash)` in its name, which has the weights, the
layout and the rank in it. This program writes to such a store, ends, reads it with a new engine, damages it, and reads
again. Run it with `python examples/own_store.py [FOLDER]`. It needs no GPU.
"""

import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, Request, StorageConfig
from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.base import SEAL_BYTES, Blocks, StorageStats, Written, seal
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace


class FolderStore:
    """Made once in each rank's storage process. One thread reads while another one writes."""

    needs_token_ids = False  # True: `blocks.token_ids` has the prompt's tokens

    def __init__(self, options: Mapping[str, object], space: KeySpace, segment: object) -> None:
        """`options` are those of `StorageConfig`; stores that register memory need `segment`, the CPU tier's."""
        del segment
        if "path" not in options:
            raise StorageRefusedError("options.path is missing")  # refused for good; StorageError: try again later
        self._folder, self._space = Path(str(options["path"])), space
        self._folder.mkdir(parents=True, exist_ok=True)

    def _file(self, block_hash: bytes) -> Path:
        return self._folder / self._space.key(block_hash).replace(":", "-")

    def count_leading(self, blocks: Blocks) -> int:
        """How many blocks are there, counted from the first one to the first that is missing."""
        there = [self._file(block_hash).exists() for block_hash in blocks.hashes]
        return [*there, False].index(False)

    def read(self, blocks: Blocks) -> int:
        """Fills the buffers; returns how many, from the first on, are whole."""
        for number, (block_hash, buffer) in enumerate(zip(blocks.hashes, blocks.buffers, strict=True)):
            data = self._file(block_hash).read_bytes() if self._file(block_hash).exists() else b""
            if len(data) != len(buffer) + SEAL_BYTES or seal(block_hash, data[SEAL_BYTES:]) != data[:SEAL_BYTES]:
                self.remove([block_hash])  # else it would never be written again
                return number
            buffer[:] = data[SEAL_BYTES:]
        return len(blocks.hashes)

    def write(self, blocks: Blocks) -> Written:
        """Keeps the blocks that are not there yet; returns how many are there now, and how many bytes were written."""
        num_bytes = 0
        for block_hash, buffer in zip(blocks.hashes, blocks.buffers, strict=True):
            if not self._file(block_hash).exists():
                num_bytes += self._file(block_hash).write_bytes(seal(block_hash, buffer) + bytes(buffer))
        return Written(len(blocks.hashes), num_bytes)

    def remove(self, hashes: Sequence[bytes]) -> int:
        """Forgets blocks; returns how many were there."""
        there = [file for file in map(self._file, hashes) if file.exists()]
        for file in there:
            file.unlink(missing_ok=True)
        return len(there)

    def clear(self, weights_id: str) -> int:
        """Forgets all blocks of these weights; this store cannot tell whose they are, and keeps them."""
        del weights_id
        return 0

    def stats(self) -> StorageStats:
        return StorageStats()

    def close(self) -> None:
        pass


def serve(folder: Path) -> int:
    """An engine's whole life: one request; returns how many tokens of its prompt came from the store."""
    config = CacheConfig(
        block_size=16,
        num_gpu_blocks=16,
        num_cpu_blocks=32,
        min_prefetch_tokens=64,
        prefetch_policy="wait_complete",
        load_policy="always",  # no model here, so "auto" would rather compute than load
        layout=KVLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype="float32"),
        # module:Class, imported by the storage process from where this process finds its modules
        storage=StorageConfig(kind="own_store:FolderStore", weights_id="sum@1", options={"path": str(folder)}),
    )
    with PrefixCacheManager(config) as cache:
        request = Request(request_id="1", prompt_token_ids=list(range(200)))
        cache.prefetch(request)
        match = cache.match(request).wait()
        cache.allocate(request, 13 - len(match.block_ids))  # the model would compute the rest of the prompt here
        cache.commit(request, 200)
        cache.release(request)
        cache.storage.flush(timeout_seconds=30)
        return match.num_storage_tokens


def main(folder: Path) -> None:
    print(f"the first engine read {serve(folder)} tokens")
    print(f"the second engine read {serve(folder)} tokens")
    for file in folder.iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"?")
    print(f"after damage to every file the third engine read {serve(folder)} tokens")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as temporary:
            main(Path(temporary))
