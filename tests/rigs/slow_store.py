"""A store that hangs for as long as a file is there, for tests: `tests.rigs.slow_store:HangingStore`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastdeploy_cache.transfer_manager.storage.base import Blocks, Segment
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from tests.rigs.memory_storage import MemoryStorage


class HangingStore(MemoryStorage):
    """Option `hang`: the path of the file that makes look-ups and reads hang, as a dead network would."""

    def __init__(self, options: Mapping[str, Any], space: KeySpace, segment: Segment) -> None:
        super().__init__({}, space, segment)
        self._hang = Path(options["hang"])

    def count_leading(self, blocks: Blocks) -> int:
        self._maybe_hang()
        return super().count_leading(blocks)

    def read(self, blocks: Blocks) -> int:
        self._maybe_hang()
        return super().read(blocks)

    def _maybe_hang(self) -> None:
        while self._hang.exists():
            time.sleep(0.01)
