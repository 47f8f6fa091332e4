"""Records of runs, as an engine tells them to its publisher."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastdeploy_cache.events.journal import RunTold

SIZE = 4


def tokens(*blocks: int) -> bytes:
    """Blocks that each have one token all over."""
    return np.repeat(np.array(blocks, np.int32), SIZE).tobytes()


def told(number: int, blocks: bytes, **fields: Any) -> RunTold:
    """A run on the GPU, whole."""
    num_blocks = len(blocks) // SIZE // 4
    said: dict[str, Any] = {
        "number": number, "parent": 0, "namespace": "", "num_blocks": num_blocks, "first": 0, "tokens": blocks,
        "extras": None, "num_gpu": num_blocks, "cpu_start": 0, "num_cpu": 0, "anchors": [],
    }  # fmt: skip
    return RunTold(**{**said, **fields})
