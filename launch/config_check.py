"""What a configuration means in blocks and bytes."""

from __future__ import annotations

from pathlib import Path

from fastdeploy_cache import CacheConfig
from ipc.memory_limit import check_available


def describe(path: Path) -> str:
    """The sizes that follow from a file (and the environment), one a line.

    Raises:
        ConfigError: the file is unreadable or says something impossible.
        NotEnoughMemoryError: its pools would not fit into this machine now.
    """
    config = CacheConfig.load(path)
    layout, (num_gpu_blocks, num_cpu_blocks) = config.rank_layout(), config.pool_sizes()
    tp_size = config.transfer.tp_size
    lines = [
        f"{path}: ok",
        f"GPU pool: {num_gpu_blocks} blocks, {num_gpu_blocks * config.block_size} tokens",
        f"CPU pool: {num_cpu_blocks} blocks, {num_cpu_blocks * config.block_size} tokens",
        f"ranks: {tp_size}" if num_cpu_blocks else "ranks: none are started without a CPU pool",
    ]
    if layout is not None:
        total_bytes = tp_size * layout.block_bytes * (num_gpu_blocks + num_cpu_blocks)
        lines.append(
            f"bytes: {layout.block_bytes} per block and rank, {total_bytes} in all ({total_bytes / 2**30:.2f} GiB)"
        )
        check_available(total_bytes, "the configuration")
    return "\n".join(lines)
