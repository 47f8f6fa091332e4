"""Where a store of each kind lives in the tests, and how its objects are changed behind its back."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, Storage
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.encrypted import EncryptedStorage
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.storage.tenant_keys import TenantKeys
from tests.rigs.storage_servers import MooncakeLender, MooncakeMaster, ValkeyServer

NUM_BLOCKS = 24


class Prompt:
    """Blocks of one prompt in a segment of their own: what a test writes and reads back."""

    def __init__(self, segment: Segment, seed: int = 0) -> None:
        random = np.random.default_rng(seed)
        self.segment = segment
        self.hashes = [random.bytes(32) for _ in range(len(segment))]
        self.data = random.integers(0, 256, segment.shape, np.uint8)

    def blocks(self, start: int = 0, stop: int | None = None, hashes: Sequence[bytes] | None = None) -> Blocks:
        """Some of the blocks, or others' hashes over their memory."""
        rows = self.segment[start:stop]
        return Blocks(
            hashes=self.hashes[start:stop] if hashes is None else hashes,
            buffers=[memoryview(row) for row in rows],
            addresses=[row.ctypes.data for row in rows],
            token_ids=np.arange(4 * len(self.segment[:stop]), dtype=np.int32),
            priority=100.0,
        )

    def fill(self) -> None:
        """Put the data into the segment."""
        self.segment[:] = self.data

    def wipe(self) -> None:
        """Put something else there."""
        self.segment[:] = 0xA5


class Place:
    """One kind of store, empty for the test's weights; opens stores and closes them all."""

    def __init__(self, kind: str, options: dict[str, Any]) -> None:
        self.kind = kind
        self.options = options
        self.weights_id = uuid.uuid4().hex
        self._stores: list[Storage] = []

    def space(self, object_bytes: int = 1000, **fields: Any) -> KeySpace:
        """A key space of the test's weights, with other fields where given."""
        space = KeySpace(
            weights_id=self.weights_id, layout="bytes", object_bytes=object_bytes, block_size=4, rank=0, tp_size=2
        )
        return msgspec.structs.replace(space, **fields)

    def open(self, space: KeySpace | None = None, num_blocks: int = NUM_BLOCKS) -> tuple[Storage, Prompt]:
        """A store, and a prompt in its segment."""
        space = space or self.space()
        prompt = Prompt(np.zeros((num_blocks, space.object_bytes), np.uint8))
        store = open_storage(self.kind, self.options, space, prompt.segment)
        self._stores.append(store)
        prompt.fill()
        return store, prompt

    def close(self) -> None:
        """Close every store; again where the test has."""
        for store in self._stores:
            store.close()
        self._stores.clear()

    def change(self, verb: str, space: KeySpace, prompt: Prompt, index: int) -> None:
        """`flip` a bit of a stored object, or `cut` its end off, unseen by the store."""
        raise NotImplementedError


class MemoryPlace(Place):
    """A dictionary."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        super().__init__("tests.rigs.memory_storage:MemoryStorage", {"objects": self.objects, "needs_token_ids": "1"})

    def change(self, verb: str, space: KeySpace, prompt: Prompt, index: int) -> None:
        """In the dictionary."""
        key = space.key(prompt.hashes[index])
        self.objects[key] = changed(verb, self.objects[key])


class EncryptedPlace(MemoryPlace):
    """A dictionary of what is encrypted."""

    def open(self, space: KeySpace | None = None, num_blocks: int = NUM_BLOCKS) -> tuple[Storage, Prompt]:
        """With one key for all."""
        space = space or self.space()
        prompt = Prompt(np.zeros((num_blocks, space.object_bytes), np.uint8))
        keys = TenantKeys({}, b"0123456789abcdef")
        store = EncryptedStorage(self.kind, self.options, space, prompt.segment, keys)
        self._stores.append(store)
        prompt.fill()
        return store, prompt

    def change(self, verb: str, space: KeySpace, prompt: Prompt, index: int) -> None:
        """In the dictionary, whose names are of another space."""
        (key,) = [key for key in self.objects if key.endswith(prompt.hashes[index].hex())]
        self.objects[key] = changed(verb, self.objects[key])


class FilePlace(Place):
    """A folder."""

    def __init__(self, folder: Path) -> None:
        config = StorageConfig(
            kind="file",
            weights_id="any",
            folder=str(folder),
            capacity_bytes=512 * 2**20,
            slab_bytes=2**20,
            admission="all",
        )
        self._folder = folder
        super().__init__("file", config.store_options(tp_size=1))

    def change(self, verb: str, space: KeySpace, prompt: Prompt, index: int) -> None:
        """Where the data lies in one of the files."""
        data = prompt.data[index].tobytes()
        for path in self._folder.rglob("*"):
            offset = path.read_bytes().find(data) if path.is_file() else -1
            if offset >= 0:
                with path.open("r+b") as file:
                    if verb == "cut":
                        os.truncate(file.fileno(), offset + len(data) // 2)
                    else:
                        file.seek(offset)
                        file.write(changed(verb, data))
                return
        raise AssertionError("the object is in no file")


class ValkeyPlace(Place):
    """A server's database."""

    def __init__(self, server: ValkeyServer) -> None:
        config = StorageConfig(kind="valkey", weights_id="any", server_url=server.unix_url)
        self._socket_path = server.socket_path
        super().__init__("valkey", config.store_options(tp_size=1))

    def change(self, verb: str, space: KeySpace, prompt: Prompt, index: int) -> None:
        """Read and written by another client."""
        import valkey

        key = space.key(prompt.hashes[index])
        with valkey.Valkey(unix_socket_path=str(self._socket_path)) as client:
            client.set(key, changed(verb, client.get(key)))  # type: ignore[arg-type]
            client.connection_pool.disconnect()


class MooncakePlace(Place):
    """A cluster. Other tests' stores may lend memory too, but these lend none."""

    def __init__(self, master: MooncakeMaster, lender: MooncakeLender) -> None:
        config = StorageConfig(kind="mooncake", weights_id="any", master_address=master.address, segment_bytes=0)
        self._lender = lender
        super().__init__("mooncake", config.store_options(tp_size=1))

    def change(self, verb: str, space: KeySpace, prompt: Prompt, index: int) -> None:
        """Read and written by the lender."""
        self._lender.change(verb, space.key(prompt.hashes[index]))


def changed(verb: str, value: bytes) -> bytes:
    """A bit of it flipped, or its end cut off."""
    if verb == "cut":
        return value[:-9]
    half = len(value) // 2
    return value[:half] + bytes([value[half] ^ 4]) + value[half + 1 :]
