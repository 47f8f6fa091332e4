"""Storage that misbehaves as a test says: wrap any store."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fastdeploy_cache.errors import StorageError
from fastdeploy_cache.transfer_manager.storage import open_storage
from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, Storage, StorageStats, Written
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace


@dataclass(kw_only=True)
class Faults:
    """What goes wrong from now on; a test changes it between calls.

    Attributes:
        slow_seconds: every call takes so much longer.
        failures: of so many calls to come, all fail with `StorageError`; -1: for ever.
        claims: `count_leading` says that so many more blocks are there than are.
        read_fewer: `read` stops so many blocks early.
        flip_bit: `read` flips a bit of the first block that it filled (as a store that does not verify).
        hanging: while set, calls wait for `released`.
    """

    slow_seconds: float = 0.0
    failures: int = 0
    claims: int = 0
    read_fewer: int = 0
    flip_bit: bool = False
    hanging: bool = False
    entered: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


class FaultyStorage:
    """A store with faults. Opened by name (`tests.rigs.faulty_storage:FaultyStorage`) its options are those of the
    wrapped store and of it: `kind`, and numbers named as in `Faults`, which hold from the start."""

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        given = dict(options)
        kind = given.pop("kind", "tests.rigs.memory_storage:MemoryStorage")
        self.faults = Faults(
            slow_seconds=float(given.pop("slow_seconds", 0)),
            failures=int(given.pop("failures", 0)),
            claims=int(given.pop("claims", 0)),
            read_fewer=int(given.pop("read_fewer", 0)),
            flip_bit=bool(int(given.pop("flip_bit", 0))),
            hanging=bool(int(given.pop("hanging", 0))),
        )
        self.store: Storage = open_storage(kind, given, space, segment)
        self.needs_token_ids = self.store.needs_token_ids

    def count_leading(self, blocks: Blocks) -> int:
        """More than there is, where it lies."""
        self._misbehave("count_leading")
        return min(len(blocks.hashes), self.store.count_leading(blocks) + self.faults.claims)

    def read(self, blocks: Blocks) -> int:
        """Fewer blocks, or a wrong bit in the first."""
        self._misbehave("read")
        num_read = max(0, self.store.read(blocks) - self.faults.read_fewer)
        if self.faults.flip_bit and num_read:
            blocks.buffers[0][0] ^= 1
        return num_read

    def write(self, blocks: Blocks) -> Written:
        """As the wrapped store."""
        self._misbehave("write")
        return self.store.write(blocks)

    def remove(self, hashes: Sequence[bytes]) -> int:
        """As the wrapped store."""
        self._misbehave("remove")
        return self.store.remove(hashes)

    def clear(self, weights_id: str) -> int:
        """As the wrapped store."""
        self._misbehave("clear")
        return self.store.clear(weights_id)

    def stats(self) -> StorageStats:
        """Never fails, hangs or lies."""
        return self.store.stats()

    def close(self) -> None:
        """Close the wrapped store."""
        self.store.close()

    def _misbehave(self, call: str) -> None:
        if self.faults.hanging:
            self.faults.entered.set()
            self.faults.released.wait()
        if self.faults.slow_seconds:
            time.sleep(self.faults.slow_seconds)  # the fault itself, nothing waits by it
        if self.faults.failures:
            self.faults.failures -= self.faults.failures > 0
            raise StorageError(f"{call} fails, as the test said")
