"""What a configuration means in blocks and bytes."""

from __future__ import annotations

from fastdeploy_cache import CacheConfig
from ipc.memory_limit import check_available
from transfer_manager.layout import RankLayout


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
        lines.append(f"parts of a block in each of {layout.num_layers} layers: {_parts(layout)}")
    if (storage := config.storage) is not None:
        place = {"file": storage.folder, "valkey": storage.server_url, "mooncake": storage.master_address}
        lines.append(f"storage: {storage.kind} {place.get(storage.kind) or ''}, weights {storage.weights_id!r}")
        if storage.kind == "file":
            lines.append(f"bytes on disk: {storage.capacity_bytes} in all, {storage.capacity_bytes // 2**30} GiB")
    return "\n".join(lines)


def check_memory(config: CacheConfig) -> None:
    """Raise `NotEnoughMemoryError` when its pools would not fit into this machine now."""
    check_available(_total_bytes(config), "on this machine the configuration")


def _parts(layout: RankLayout) -> str:
    return ", ".join(f"{part.name} {list(part.shape)} {part.dtype}" for part in layout.parts)


def _total_bytes(config: CacheConfig) -> int:
    """In this machine's memory; KV arrays on a GPU are not."""
    layout, (num_gpu_blocks, num_cpu_blocks) = config.rank_layout(), config.pool_sizes()
    if layout is None:
        return 0
    gpu_bytes = layout.gpu_bytes(num_gpu_blocks) if config.transfer.device == "cpu" else 0
    return config.transfer.tp_size * (gpu_bytes + num_cpu_blocks * layout.block_bytes)
