"""The shared memory of the ranks, made by the engine side so that it outlives any rank."""

from __future__ import annotations

from collections.abc import Sequence

from fastdeploy_cache.ipc.memory_limit import check_available
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVMemory
from fastdeploy_cache.transfer_manager.process.words import RankSignal


class RankMemory:
    """One rank's CPU blocks and signal words, and its KV arrays where the engine owns them."""

    def __init__(
        self, rank: int, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int, with_kv: bool = True
    ) -> None:
        self.kv = KVMemory.create(layout, num_gpu_blocks, f"kv-rank{rank}") if with_kv else None
        self.cpu = SharedArray.create(f"cpu-blocks-rank{rank}", num_cpu_blocks * layout.block_bytes)
        self.signal = RankSignal.create(f"signal-rank{rank}")

    def segments(self, *, gpu: bool, cpu: bool) -> list[SharedArray]:
        """The memory of a tier, or of both."""
        kv = self.kv.segments if gpu and self.kv is not None else []
        return [*kv, self.cpu] if cpu else [*kv]

    def close(self) -> None:
        """Give the memory up; views that a model still holds stay valid."""
        if self.kv is not None:
            self.kv.close()
        self.cpu.close()
        self.signal.array.close()


def create_rank_memory(
    tp_size: int, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int, with_kv: bool = True
) -> list[RankMemory]:
    """Memory for all ranks, or none of it. `with_kv`: the KV arrays, too.

    Raises:
        NotEnoughMemoryError: all of it together is more than is available; nothing was taken.
    """
    kv_bytes = layout.gpu_bytes(num_gpu_blocks) if with_kv else 0
    total_bytes = tp_size * (kv_bytes + num_cpu_blocks * layout.block_bytes)
    check_available(total_bytes, f"{tp_size} ranks of {num_gpu_blocks} GPU and {num_cpu_blocks} CPU blocks")
    return [RankMemory(rank, layout, num_gpu_blocks, num_cpu_blocks, with_kv) for rank in range(tp_size)]


def release_pages(memory: Sequence[RankMemory], *, gpu: bool, cpu: bool) -> int:
    """Give back the pages of a tier's memory; returns how many bytes."""
    return sum(segment.release() for each in memory for segment in each.segments(gpu=gpu, cpu=cpu))


def retake_pages(memory: Sequence[RankMemory]) -> None:
    """Reserve what was released. After `NotEnoughMemoryError` a part may be there: release it again."""
    released = [s for each in memory for s in each.segments(gpu=True, cpu=True) if s.is_released]
    check_available(sum(segment.num_bytes for segment in released), "the memory of a tier that was given back")
    for segment in released:
        segment.retake()
