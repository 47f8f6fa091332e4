"""What a rank's storage process is told, and what it says of its store."""

from __future__ import annotations

from typing import Any

import msgspec

from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace


class StorageSetup(ProcessSetup, frozen=True, kw_only=True):
    """Its CPU blocks, which it inherits, and the store."""

    num_cpu_blocks: int
    cpu_fd: int
    kind: str
    options: dict[str, Any]
    space: KeySpace
    keys_file: str | None  # of the keys by which objects are encrypted
    import_paths: list[str]  # where the engine finds its modules; a store of its own is found there


class StoreReport(msgspec.Struct, frozen=True):
    """What is known of a store once it is open."""

    needs_token_ids: bool
