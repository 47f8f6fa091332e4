"""The file store on a disk that a test spoils, below `FaultyStorage`; told by a file, as it is in other processes."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, Written
from fastdeploy_cache.transfer_manager.storage.file_store import FileStorage
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from tests.rigs.faulty_storage import Faults, FaultyStorage
from tests.rigs.file_rig import FailingDisk

_FAULTS = ("slow_seconds", "failures", "claims", "read_fewer", "hanging")


class Orders:
    """What is to go wrong from now on, in a file: the test's end of it and the stores'."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def give(self, **orders: object) -> None:
        """Replace all orders.

        Those of `Faults` (but `flip_bit`, which no checksum would see; `failures` for ever only), and `errors`: error
        numbers by methods of `Disk`; `flip`: what the disk reads has a wrong bit; `read_seconds`: how much longer a
        read takes for each block.
        """
        new = self._path.with_suffix(".new")
        new.write_text(json.dumps(orders))
        new.replace(self._path)

    def read(self) -> dict[str, Any]:
        """The orders that hold."""
        try:
            found: dict[str, Any] = json.loads(self._path.read_text())
        except FileNotFoundError:
            return {}
        return found


class SpoiledDisk(FailingDisk):
    """Fails and flips bits as ordered."""

    def __init__(self, orders: Orders) -> None:
        super().__init__()
        self._orders = orders

    def _check(self, name: str) -> None:
        self.failing = self._orders.read().get("errors", {})
        super()._check(name)

    def read(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        super().read(fd, buffers, offset)
        if buffers and self._orders.read().get("flip"):
            buffers[0][0] ^= 1


class SpoiledFiles(FileStorage):
    """A small file store on such a disk. Options: `folder` and `orders`, paths."""

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        sizes = {"capacity_bytes": 2**20, "slab_bytes": 2**16}
        others = {"admission": "all", "min_priority": 0.0, "num_io_threads": 1}
        disk = SpoiledDisk(Orders(Path(options["orders"])))
        super().__init__({**sizes, **others, **options}, space, segment, disk=disk)


class TroubledStore(FaultyStorage):
    """That store with faults of its own. Options: `folder`, `orders` and `record`, paths; `needs_token_ids`, "1".

    The record has a line of JSON for each call that is about blocks.
    """

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        self._orders, self._record, self._rank = Orders(Path(options["orders"])), Path(options["record"]), space.rank
        super().__init__({**options, "kind": f"{__name__}:SpoiledFiles"}, space, segment)
        self.needs_token_ids = bool(int(options.get("needs_token_ids", 0)))

    def count_leading(self, blocks: Blocks) -> int:
        self._note("count_leading", blocks)
        return super().count_leading(blocks)

    def read(self, blocks: Blocks) -> int:
        self._note("read", blocks)
        time.sleep(self._orders.read().get("read_seconds", 0.0) * len(blocks.hashes))  # the fault itself
        return super().read(blocks)

    def write(self, blocks: Blocks) -> Written:
        self._note("write", blocks)
        return super().write(blocks)

    def _note(self, call: str, blocks: Blocks) -> None:
        line = {
            "call": call,
            "rank": self._rank,
            "hashes": [block_hash.hex() for block_hash in blocks.hashes],
            "tokens": None if blocks.token_ids is None else blocks.token_ids.tolist(),
            "priority": blocks.priority,
        }
        with self._record.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def _misbehave(self, call: str) -> None:
        orders = self._orders.read()
        self.faults = Faults(**{name: orders[name] for name in _FAULTS if name in orders})
        super()._misbehave(call)
