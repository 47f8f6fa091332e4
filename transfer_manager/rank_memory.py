"""The shared memory of the ranks, made by the engine side so that it outlives any rank."""

from __future__ import annotations

from typing import Any

import numpy as np

from ipc.memory_limit import check_available
from ipc.shared_array import SharedArray
from transfer_manager.layout import RankLayout
from transfer_manager.rank_signal import RankSignal

KVViews = list[dict[str, np.ndarray[Any, np.dtype[Any]]]]


class RankMemory:
    """One rank's KV arrays (CPU device), CPU blocks and signal words."""

    def __init__(self, rank: int, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self._layout = layout
        self._num_gpu_blocks = num_gpu_blocks
        self.kv = SharedArray.create(f"kv-rank{rank}", num_gpu_blocks * layout.block_bytes)
        self.cpu = SharedArray.create(f"cpu-blocks-rank{rank}", num_cpu_blocks * layout.block_bytes)
        self.signal_array = SharedArray.create(f"signal-rank{rank}", RankSignal.NUM_BYTES)
        self.signal = RankSignal(self.signal_array)

    def kv_views(self) -> KVViews:
        """Per layer, by part name, the array [num_gpu_blocks, *part shape] that the model reads and writes."""
        return self._layout.kv_views(self.kv, self._num_gpu_blocks)

    def close(self) -> None:
        """Give the memory up; views that a model still holds stay valid."""
        for array in (self.kv, self.cpu, self.signal_array):
            array.close()


def create_rank_memory(tp_size: int, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int) -> list[RankMemory]:
    """Memory for all ranks, or none of it.

    Raises:
        NotEnoughMemoryError: all of it together is more than is available; nothing was taken.
    """
    total_bytes = tp_size * (num_gpu_blocks + num_cpu_blocks) * layout.block_bytes
    check_available(total_bytes, f"{tp_size} ranks of {num_gpu_blocks} GPU and {num_cpu_blocks} CPU blocks")
    return [RankMemory(rank, layout, num_gpu_blocks, num_cpu_blocks) for rank in range(tp_size)]
