"""What a configuration means in blocks and bytes."""

from __future__ import annotations

from fastdeploy_cache import CacheConfig
from ipc.memory_limit import check_available


def describe(config: CacheConfig) -> str:
    """The sizes that follow from it, one a line."""
    layout, (num_gpu_blocks, num_cpu_blocks) = config.rank_layout(), config.pool_sizes()
    lines = [
        f"GPU pool: {num_gpu_blocks} blocks, {num_gpu_blocks * config.block_size} tokens",
        f"CPU pool: {num_cpu_blocks} blocks, {num_cpu_blocks * config.block_size} tokens",
        f"ranks: {config.transfer.tp_size}" if num_cpu_blocks else "ranks: none are started without a CPU pool",
    ]
    if layout is not None:
        total_bytes = _total_bytes(config)
        in_all = f"{total_bytes} in all ({total_bytes / 2**30:.2f} GiB)"
        lines.append(f"bytes: {layout.block_bytes} per block and rank, {in_all}")
    return "\n".join(lines)


def check_memory(config: CacheConfig) -> None:
    """Raise `NotEnoughMemoryError` when its pools would not fit into this machine now."""
    check_available(_total_bytes(config), "on this machine the configuration")


def _total_bytes(config: CacheConfig) -> int:
    layout = config.rank_layout()
    return config.transfer.tp_size * layout.block_bytes * sum(config.pool_sizes()) if layout is not None else 0
