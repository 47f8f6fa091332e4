"""A store that never answers, for `bench storage`: `fastdeploy_cache.launch.bench.hung_store:HungStore`."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment, StorageStats, Written
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

_A_DAY_SECONDS = 86400.0


class HungStore:
    """Every call hangs, as on a network that swallows packets, until its process is killed."""

    needs_token_ids = False

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        """Opens at once."""

    def _hang(self) -> None:
        threading.Event().wait(_A_DAY_SECONDS)

    def count_leading(self, blocks: Blocks) -> int:  # noqa: ARG002
        """Hangs."""
        self._hang()
        return 0

    def read(self, blocks: Blocks) -> int:  # noqa: ARG002
        """Hangs."""
        self._hang()
        return 0

    def write(self, blocks: Blocks) -> Written:  # noqa: ARG002
        """Hangs."""
        self._hang()
        return Written(0, 0)

    def remove(self, hashes: Sequence[bytes]) -> int:  # noqa: ARG002
        """Hangs."""
        self._hang()
        return 0

    def clear(self, weights_id: str) -> int:  # noqa: ARG002
        """Hangs."""
        self._hang()
        return 0

    def stats(self) -> StorageStats:
        """Nothing is known."""
        return StorageStats()

    def close(self) -> None:
        """Nothing to give back."""
