"""The protocol of a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import msgspec

from fastdeploy_cache.errors import DeviceError
from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.device.images import CheckpointImage, ImageMove, check_units
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask


class DeviceSetup(msgspec.Struct, frozen=True, kw_only=True):
    """Which device a rank opens, and the blocks that it moves."""

    rank: int
    kind: str
    device_id: int
    layout: RankLayout
    num_gpu_blocks: int
    num_cpu_blocks: int
    kv: KVHandle | None  # None: the rank makes the KV arrays


class Device(Protocol):
    """One rank's KV arrays and CPU blocks, in the rank (or inline in the engine).

    At most one thread copies in each lane at a time (COPY goes by that of SWAP_IN). What has a body here is so of the
    processor.
    """

    def copy(
        self,
        kind: TaskKind,
        source_ids: Int32Array,
        destination_ids: Int32Array,
        on_layer: Callable[[int], None],
        num_tokens: int | None = None,
    ) -> int:
        """Copy block `source_ids[i]` to block `destination_ids[i]`.

        SWAP_OUT: from GPU blocks to CPU blocks; SWAP_IN: the other way; COPY: within the GPU blocks (no id may be both
        source and destination), and of each block the first `num_tokens` tokens only, where that is given; parts
        without a token axis are copied whole.

        Calls `on_layer(n)` with rising n when the first n layers are in place, last with all. Returns the bytes moved;
        all are in place then.

        Raises:
            DeviceError: lists of different length or an id outside its pool, and nothing was copied; or the hardware
                failed, and what is in the destinations is unknown.
        """
        ...

    def copy_units(
        self, row: int, source_ids: Int32Array, destination_ids: Int32Array, num_tokens: int | None = None
    ) -> int:
        """The same as a COPY, of the units of a row behind the full one. By the thread of SWAP_IN."""
        ...

    def move_image(self, kind: TaskKind, image: CheckpointImage, on_layer: Callable[[int], None]) -> ImageMove:
        """Copy a checkpoint: SWAP_OUT from its units to its pages, SWAP_IN the other way.

        Yields between two steps, when all of those before are in place, and may be left then; returns the bytes moved.
        Calls `on_layer` as `copy` does. Raises `DeviceError` as `copy` does: what the image cannot be is found before
        anything is copied.
        """
        ...

    def wipe(self, gpu_ids: Int32Array, cpu_ids: Int32Array, row: int = 0) -> int:
        """Overwrite these blocks with zeros. Returns their bytes. By the thread of SWAP_OUT.

        With a `row` behind the full one `gpu_ids` are units of that one.

        Raises:
            DeviceError: an id outside its pool, and nothing was overwritten; or the hardware failed.
        """
        ...

    def bind_thread(self) -> None:
        """Called by each thread before its first copy."""
        return

    @property
    def is_lost(self) -> bool:
        """Whether the hardware has failed in a way that only a new process recovers from."""
        return False

    def close(self) -> None:
        """Give up what is attached; no copy may run. Safe to call twice."""
        ...


def copy_task(device: Device, task: TransferTask, on_layer: Callable[[int], None]) -> int | ImageMove:
    """Do a task: the bytes moved, or of a checkpoint the steps, which return them."""
    if task.kind is TaskKind.WIPE:
        return device.wipe(task.destination_ids, task.source_ids, task.row)
    if task.units:
        return device.move_image(task.kind, CheckpointImage.of(task), on_layer)
    if task.row:
        return device.copy_units(task.row, task.source_ids, task.destination_ids, task.num_tokens)
    return device.copy(task.kind, task.source_ids, task.destination_ids, on_layer, task.num_tokens)


def check_ids(
    kind: TaskKind, source_ids: Int32Array, destination_ids: Int32Array, num_gpu_blocks: int, num_cpu_blocks: int
) -> None:
    """Raise `DeviceError` for lists of different length or ids outside the pools of their tiers."""
    pools = {True: ("GPU", num_gpu_blocks), False: ("CPU", num_cpu_blocks)}
    _check_pool(*pools[kind is not TaskKind.SWAP_IN], source_ids)
    _check_pool(*pools[kind is not TaskKind.SWAP_OUT], destination_ids)
    _check_lengths(source_ids, destination_ids)


def wiped_bytes(
    layout: RankLayout, row: int, gpu_ids: Int32Array, cpu_ids: Int32Array, num_blocks: tuple[int, int]
) -> int:
    """The bytes of what is to be wiped; raises `DeviceError` for ids outside the pools of their tiers, or the row.
    `num_blocks`: of the pools of full blocks, by tier."""
    if row:
        _check_row(layout, row)
        check_units(layout, row, gpu_ids)
    else:
        _check_pool("GPU", num_blocks[0], gpu_ids)
    _check_pool("CPU", num_blocks[1], cpu_ids)
    on_gpu = layout.unit_bytes(row) if row else layout.block_bytes
    return len(gpu_ids) * on_gpu + len(cpu_ids) * layout.block_bytes


def check_unit_ids(layout: RankLayout, row: int, source_ids: Int32Array, destination_ids: Int32Array) -> None:
    """The same of the units of a row behind the full one."""
    _check_row(layout, row)
    check_units(layout, row, source_ids)
    check_units(layout, row, destination_ids)
    _check_lengths(source_ids, destination_ids)


def _check_row(layout: RankLayout, row: int) -> None:
    if not 0 < row < len(layout.rows):
        raise DeviceError(f"a task of units of row {row}; the layout's rows behind the full one are {layout.rows[1:]}")


def _check_lengths(source_ids: Int32Array, destination_ids: Int32Array) -> None:
    if len(source_ids) != len(destination_ids):
        raise DeviceError(f"{len(source_ids)} source block ids for {len(destination_ids)} destination block ids")


def _check_pool(tier: str, num_blocks: int, ids: Int32Array) -> None:
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_blocks):
        raise DeviceError(f"{tier} block ids {ids.min()}..{ids.max()} leave the pool of {num_blocks} blocks")
