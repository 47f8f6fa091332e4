"""A store that never answers, for `bench storage`: `fastdeploy_cache.launch.bench.hung_store:HungStore`."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, NoReturn

from fastdeploy_cache.transfer_manager.storage.base import Segment, StorageStats
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace

_A_DAY_SECONDS = 86400.0


class HungStore:
    """Every call hangs, as on a network that swallows packets, until its process is killed."""

    needs_token_ids = False

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        """Opens at once."""

    def _hang(self, _: object) -> NoReturn:
        threading.Event().wait(_A_DAY_SECONDS)
        raise TimeoutError

    count_leading = read = write = remove = clear = _hang

    def stats(self) -> StorageStats:
        """Nothing is known."""
        return StorageStats()

    def close(self) -> None:
        """Nothing to give back."""
