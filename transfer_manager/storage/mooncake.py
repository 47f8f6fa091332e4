"""A Mooncake cluster as a store: one object for each block, its checksum behind the data."""

from __future__ import annotations

import importlib
import mmap
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.errors import StorageError, StorageGoneError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.base import SEAL_BYTES, Blocks, Segment, StorageStats, Written, seal
from fastdeploy_cache.transfer_manager.storage.keys import DIGEST, MARK_AT, KeySpace, weights_prefix

# Mooncake reads these when it is loaded. Without them a master that hangs holds a call for 30 s, and one that is not
# there a set-up for a minute and more.
_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "800",
    "MC_RPC_CONNECT_TIMEOUT_MS": "300",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "WARNING",  # it writes to stderr, else a dozen lines each time a client starts
}
_OK = 0
_NO_SPACE = -200
_MASTER_GONE = (-900, -901)  # refused, timed out
_WRONG_LENGTH = (-600, -800)  # -800 says "transfer failed" too
_SEALS_PER_CALL = 256
_LOCAL_BUFFER_BYTES = 16 * 2**20  # Mooncake's own, for calls that this store does not make; it insists on some


class MooncakeStorage:
    """Blocks as objects of the cluster, moved from and to the rank's segment without a copy in this process.

    Objects are replicated once and evicted by the master, so a write is best effort: what finds no space is declined
    (`num_declined`). Return codes below 0 are misses, but -900 and -901, the master's silence, are a `StorageError`.
    Whether an object exists is the master's opinion: it holds for some 10 s after the memory's owner has died.
    """

    needs_token_ids = False

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        """See `OpenStorage`. Lends `segment_bytes` to the cluster until it is closed."""
        self._space = space
        self._num_declined = self._num_damaged = 0
        self._closing = threading.Lock()
        # Mooncake registers whole pages; a page that is shared with other data would be registered twice
        self._seal_pages = mmap.mmap(-1, 2 * _SEALS_PER_CALL * SEAL_BYTES)
        seals = np.frombuffer(self._seal_pages, np.uint8).reshape(2, _SEALS_PER_CALL, SEAL_BYTES)
        self._read_seals, self._write_seals = seals  # one for each thread
        self._segment = segment
        self._store: Any = connect(options, int(options["segment_bytes"]))
        try:
            for memory in (self._segment, self._read_seals, self._write_seals):
                register(self._store, memory)
        except StorageError:
            self.close()
            raise

    def count_leading(self, blocks: Blocks) -> int:
        """See `Storage`. One call to the master."""
        return [*self.find(blocks.hashes), False].index(False)

    def find(self, hashes: Sequence[bytes]) -> list[bool]:
        """See `Storage`. One call to the master."""
        if not hashes:
            return []
        codes = answered("batch_is_exist", self._client().batch_is_exist(self._keys(hashes)))
        return [code == 1 for code in codes]

    def read(self, blocks: Blocks) -> int:
        """See `Storage`. What is not exactly what was written is removed, and the read ends there."""
        whole = self._space.object_bytes + SEAL_BYTES
        for start in range(0, len(blocks.hashes), _SEALS_PER_CALL):
            hashes = blocks.hashes[start : start + _SEALS_PER_CALL]
            codes = self._client().batch_get_into_multi_buffers(
                self._keys(hashes), self._pointers(blocks, start, self._read_seals), self._sizes(len(hashes))
            )
            answered("batch_get_into_multi_buffers", codes)
            for index, code in enumerate(codes):
                block_hash = hashes[index]
                sealed = code == whole and self._read_seals[index].tobytes() == seal(
                    block_hash, blocks.buffers[start + index]
                )
                if not sealed:
                    self._drop_damaged(block_hash, code)
                    return start + index
        return len(blocks.hashes)

    def write(self, blocks: Blocks) -> Written:
        """See `Storage`. A block that finds no space ends it."""
        if not blocks.hashes:
            return Written(0, 0)
        whole, num_bytes = self._space.object_bytes + SEAL_BYTES, 0
        known = answered("batch_is_exist", self._client().batch_is_exist(self._keys(blocks.hashes)))
        missing = [index for index, code in enumerate(known) if code != 1]
        for start in range(0, len(missing), _SEALS_PER_CALL):
            batch = missing[start : start + _SEALS_PER_CALL]
            for index, code in zip(batch, self._put(blocks, batch), strict=True):
                if code == _NO_SPACE:
                    self._num_declined += len(blocks.hashes) - index
                    return Written(index, num_bytes)
                if code != _OK:
                    raise StorageError(f"Mooncake's batch_put_from_multi_buffers returned {code}")
                num_bytes += whole
        return Written(len(blocks.hashes), num_bytes)

    def remove(self, hashes: Sequence[bytes]) -> int:
        """See `Storage`. Leases of readers do not hold it up: their reads fail, or find a wrong seal."""
        if not hashes:
            return 0
        codes = answered("batch_remove", self._client().batch_remove(self._keys(hashes), True))
        return codes.count(_OK)

    def clear(self, weights_id: str) -> int:
        """See `Storage`."""
        return remove_weights(self._client(), weights_id)

    def remove_owned(self, weights_id: str, owner: bytes) -> int:
        """See `Storage`."""
        return remove_weights(self._client(), weights_id, owner)

    def stats(self) -> StorageStats:
        """See `StorageStats`; sizes are the cluster's affair."""
        return StorageStats(num_declined=self._num_declined, num_damaged=self._num_damaged)

    def close(self) -> None:
        """Take back what was lent; Mooncake needs about two seconds for it. Closing again does nothing."""
        with self._closing:
            store, self._store = self._store, None
        if store is not None:
            for memory in (self._segment, self._read_seals, self._write_seals):
                store.unregister_buffer(memory.ctypes.data)
            store.close()

    def _client(self) -> Any:
        if self._store is None:
            raise StorageGoneError("the Mooncake store is closed")
        return self._store

    def _put(self, blocks: Blocks, batch: Sequence[int]) -> list[int]:
        hashes = [blocks.hashes[index] for index in batch]
        pointers = []
        for row, index in enumerate(batch):
            self._write_seals[row] = np.frombuffer(seal(blocks.hashes[index], blocks.buffers[index]), np.uint8)
            pointers.append([blocks.addresses[index], self._write_seals[row].ctypes.data])
        codes = self._client().batch_put_from_multi_buffers(self._keys(hashes), pointers, self._sizes(len(batch)))
        return answered("batch_put_from_multi_buffers", codes)

    def _drop_damaged(self, block_hash: bytes, code: int) -> None:
        """Remove what cannot be read, unless it is the transfer that failed."""
        whole = self._space.object_bytes + SEAL_BYTES
        if code < 0:
            if code not in _WRONG_LENGTH:
                return
            # a dead owner and an object of the wrong length are answered alike; the master knows the length
            size = self._client().get_size(self._space.key(block_hash))
            if size < 0 or size == whole:
                return
        if self.remove([block_hash]):
            self._num_damaged += 1

    def _keys(self, hashes: Sequence[bytes]) -> list[str]:
        return [self._space.key(block_hash) for block_hash in hashes]

    def _sizes(self, num: int) -> list[list[int]]:
        return [[self._space.object_bytes, SEAL_BYTES]] * num

    def _pointers(self, blocks: Blocks, start: int, seals: Segment) -> list[list[int]]:
        addresses, first = blocks.addresses[start : start + _SEALS_PER_CALL], seals.ctypes.data
        return [[address, first + row * SEAL_BYTES] for row, address in enumerate(addresses)]


def check_options(options: Mapping[str, Any]) -> None:  # noqa: ARG001 (what they say, only its master can judge)
    """Raise `StorageRefusedError` where the package is missing."""
    _new_client()


def connect(options: Mapping[str, Any], segment_bytes: int) -> Any:
    """A `MooncakeDistributedStore` that lends so much to the cluster; whoever calls closes it.

    Raises:
        StorageRefusedError: the package is missing.
        StorageError: the master does not take it.
    """
    client, address = _new_client(), options["master_address"]
    code = client.setup(
        options["local_hostname"],
        options["metadata_server"],
        segment_bytes,
        _LOCAL_BUFFER_BYTES,
        options["protocol"],
        options["device_name"],
        address,
    )
    if code != _OK:
        client.close()
        raise StorageError(f"Mooncake's set-up with the master at {address} returned {code}; is it running?")
    return client


def register(client: Any, memory: Segment) -> None:
    """Let Mooncake read from and write to this memory; raises `StorageError`."""
    code = client.register_buffer(memory.ctypes.data, memory.nbytes) if memory.nbytes else _OK
    if code != _OK:
        raise StorageError(f"Mooncake did not register {memory.nbytes} bytes of memory: {code}")


def answered(call: str, codes: list[int]) -> list[int]:
    """The codes, or the error that the whole call came to."""
    for code in codes:
        if code in _MASTER_GONE:
            raise StorageError(f"Mooncake's {call} returned {code}: its master does not answer")
    return codes


def remove_weights(client: Any, weights_id: str, owner: bytes = b"") -> int:
    """Remove all objects of these weights, or of these an owner's; returns how many there were. Raises
    `StorageError`."""
    of_owner = f"{DIGEST.pattern}:[0-9a-f]{{{2 * MARK_AT}}}{owner.hex()}" if owner else ""
    pattern = f"^{weights_prefix(weights_id)}{of_owner}.*"
    (count,) = answered("remove_by_regex", [int(client.remove_by_regex(pattern, True))])
    if count < 0:
        raise StorageError(f"Mooncake's remove_by_regex returned {count}")
    return count


def _new_client() -> Any:
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        return importlib.import_module("mooncake.store").MooncakeDistributedStore()
    except ImportError as error:
        raise StorageRefusedError(
            f"storage.kind 'mooncake' needs pip install mooncake-transfer-engine-non-cuda (or the CUDA build), "
            f"and apt-get install libibverbs1: {error}"
        ) from error
