"""What a configuration means in blocks and bytes, and whether this machine has what it needs."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.errors import CacheError, DeviceError, LaunchError, StorageRefusedError, counted
from fastdeploy_cache.events.names import NameScheme
from fastdeploy_cache.events.query_token import read_token
from fastdeploy_cache.ipc.memory_limit import check_available
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.parts import KVPart
from fastdeploy_cache.transfer_manager.peer.signature import load_secret
from fastdeploy_cache.transfer_manager.storage import check_store
from fastdeploy_cache.transfer_manager.storage.encrypted import check_encryption
from fastdeploy_cache.transfer_manager.storage.file_place import check_place
from fastdeploy_cache.transfer_manager.storage.file_space import slab_bytes, space_folders


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
        lines += _describe_rows(config, layout)
    if (storage := config.storage) is not None:
        place = {"file": storage.folder, "valkey": storage.server_url, "mooncake": storage.master_address}
        kind = f"{storage.kind} {place.get(storage.kind) or ''}".rstrip()
        lines.append(f"storage: {kind}, weights {storage.weights_id!r}")
        if storage.kind == "file":
            lines.append(f"bytes on disk: {storage.capacity_bytes} in all, {storage.capacity_bytes // 2**30} GiB")
    return "\n".join(lines)


def _describe_rows(config: CacheConfig, layout: RankLayout) -> list[str]:
    """Where all layers are alike, what a block of each has; else each row, and what a checkpoint takes and is worth."""
    if not layout.rows:
        return [f"parts of a block in each of {counted(layout.num_layers, 'layer')}: {_parts(layout.parts)}"]
    lines, token_bytes = [], layout.block_bytes / config.block_size
    for index, (row, units) in enumerate(
        zip(layout.rows, (config.pool_sizes()[0], *config.unit_counts()), strict=True)
    ):
        layers = [layer for layer in layout.layers if layer.row == index]
        unit_bytes = layout.unit_bytes(index)
        lines.append(
            f"row {row}: {counted(len(layers), 'layer')}; {units} {'units' if index else 'blocks'} of {unit_bytes} "
            f"bytes a rank, {units * unit_bytes / 2**30:.2f} GiB"
        )
        lines += [f"  parts in a layer: {parts}" for parts in dict.fromkeys(_parts(layer.parts) for layer in layers)]
        if index:
            num_units = row.num_checkpoint_units
            worth = round(num_units * unit_bytes / token_bytes)
            lines.append(f"  of a checkpoint: {counted(num_units, 'unit')}, as full KV of {counted(worth, 'token')}")
    num_bytes, pages = layout.checkpoint_bytes, layout.num_checkpoint_pages
    lost = 1 - num_bytes / (pages * layout.block_bytes) if pages else 0.0
    worth = round(num_bytes / token_bytes)
    lines.append(
        f"checkpoint: at most {num_bytes} bytes a rank ({num_bytes / 2**20:.1f} MiB), as full KV of "
        f"{counted(worth, 'token')}; {counted(pages, 'page')} of the CPU pool, of which {lost:.1%} stays empty"
    )
    return lines


def find_problems(config: CacheConfig) -> list[str]:
    """What an engine with it would lack on this machine now: each in a line. Leaves nothing behind."""
    problems = []
    for check in (_check_memory, _check_device, _check_storage, _check_folder, _check_peer, _check_events):
        try:
            check(config)
        except CacheError as error:
            problems.append(str(error))
    return problems


def _check_memory(config: CacheConfig) -> None:
    check_available(_total_bytes(config), "on this machine the configuration")


def _check_device(config: CacheConfig) -> None:
    transfer = config.transfer
    if transfer.device != "cuda":
        return
    from fastdeploy_cache.transfer_manager.device.cuda_driver import Cuda  # late: needs NVIDIA's bindings

    for rank in range(transfer.tp_size):
        try:
            Cuda(transfer.device_id(rank))
        except DeviceError as error:
            raise LaunchError(f"transfer.device is 'cuda', and rank {rank} cannot have its device: {error}") from error


def _check_storage(config: CacheConfig) -> None:
    """Whether the store can be opened as it is configured. Servers are not asked: an engine starts without them."""
    storage = config.storage
    if storage is not None:
        try:
            check_store(storage.kind, storage.store_options(config.transfer.tp_size))
            if storage.keys_file is not None:
                check_encryption(storage.keys_file)
        except StorageRefusedError as error:
            where = "; this command looks in PYTHONPATH and among installed packages" if storage.is_own_store else ""
            raise StorageRefusedError(f"{error}{where}") from error


def _check_folder(config: CacheConfig) -> None:
    if config.storage is None or config.storage.folder is None:
        return
    folder = Path(config.storage.folder).absolute()
    made = [path for path in (folder, *folder.parents) if _is_missing(path)]  # the innermost first
    try:
        check_place(config.storage)
        _check_disk(folder, config.storage.capacity_bytes)
    except OSError as error:
        raise LaunchError(f"storage.folder is {str(folder)!r}, and its disk cannot be looked at: {error}") from error
    finally:
        for path in made:
            with contextlib.suppress(OSError):  # it could not be made, or is in use by now
                path.rmdir()


def _check_peer(config: CacheConfig) -> None:
    peer = config.peer
    if peer is not None and peer.secret_file is not None:
        load_secret(Path(peer.secret_file))
    if peer is not None and peer.keys_folder is not None:
        load_keys(Path(peer.keys_folder))


def _check_events(config: CacheConfig) -> None:
    """Whether the keys and the token can be read, and names be made."""
    events = config.events
    if events is None:
        return
    read_token(events.query_token_file)
    NameScheme(kind=events.block_names).names()
    if events.keys_folder is not None:
        load_keys(Path(events.keys_folder))


def _is_missing(path: Path) -> bool:
    try:
        path.lstat()
    except OSError as error:
        return isinstance(error, FileNotFoundError)
    return False


def _check_disk(folder: Path, capacity_bytes: int) -> None:
    num_free, num_taken = shutil.disk_usage(folder).free, sum(map(slab_bytes, space_folders(folder)))
    if capacity_bytes > num_free + num_taken:
        taken = f", and the store there takes {num_taken} already" if num_taken else ""
        raise LaunchError(
            f"storage.capacity_bytes is {capacity_bytes}, but the disk of {str(folder)!r} has {num_free} bytes "
            f"free{taken}; lower it, or make room"
        )


def _parts(parts: Sequence[KVPart]) -> str:
    return ", ".join(f"{part.name} {list(part.shape)} {part.dtype}" for part in parts)


def _total_bytes(config: CacheConfig) -> int:
    """The bytes that are taken in this machine's memory. KV arrays on a GPU are not in it."""
    layout, (num_gpu_blocks, num_cpu_blocks) = config.rank_layout(), config.pool_sizes()
    if layout is None:
        return 0
    gpu_bytes = layout.gpu_bytes(num_gpu_blocks) if config.transfer.device == "cpu" else 0
    return config.transfer.tp_size * (gpu_bytes + num_cpu_blocks * layout.block_bytes)
