"""The device for machines without an accelerator: KV arrays in shared memory, copied by the processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ipc.shared_array import SharedArray
from transfer_manager.errors import DeviceError
from transfer_manager.layout import RankLayout
from transfer_manager.task import Direction, Int32Array

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class CpuDevice:
    """See `transfer_manager.device.base.Device`."""

    def __init__(
        self, layout: RankLayout, kv: SharedArray, cpu: SharedArray, num_gpu_blocks: int, num_cpu_blocks: int
    ) -> None:
        self._num_blocks = {"GPU": num_gpu_blocks, "CPU": num_cpu_blocks}
        shape = (num_cpu_blocks, layout.block_bytes)
        images = cpu.view(np.uint8, shape) if num_cpu_blocks else np.empty(shape, np.uint8)
        # per layer, the pairs (pieces on the device, the same part inside the images), each [num_blocks, part bytes]
        self._layers: list[list[tuple[Bytes, Bytes]]] = []
        for layer in range(layout.num_layers):
            pairs = []
            for index, part in enumerate(layout.parts):
                device_offset = layout.device_offset_bytes(layer, index, num_gpu_blocks)
                image_offset = layout.image_offset_bytes(layer, index)
                pieces = kv.view(np.uint8, (num_gpu_blocks, part.num_bytes), device_offset)
                pairs.append((pieces, images[:, image_offset : image_offset + part.num_bytes]))
            self._layers.append(pairs)
        self._block_bytes = layout.block_bytes

    def copy(
        self,
        direction: Direction,
        source_ids: Int32Array,
        destination_ids: Int32Array,
        on_layer: Callable[[int], None],
    ) -> int:
        self._check("CPU" if direction is Direction.SWAP_IN else "GPU", source_ids)
        self._check("CPU" if direction is Direction.SWAP_OUT else "GPU", destination_ids)
        if len(source_ids) != len(destination_ids):
            raise DeviceError(f"{len(source_ids)} source block ids for {len(destination_ids)} destination block ids")
        spans = list(_spans(source_ids, destination_ids))
        for layer, pairs in enumerate(self._layers):
            for pieces, images in pairs:
                sources = images if direction is Direction.SWAP_IN else pieces
                destinations = images if direction is Direction.SWAP_OUT else pieces
                for source, destination in spans:
                    destinations[destination] = sources[source]
            on_layer(layer + 1)
        return len(source_ids) * self._block_bytes

    def _check(self, tier: str, ids: Int32Array) -> None:
        num_blocks = self._num_blocks[tier]
        if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < num_blocks):
            raise DeviceError(f"{tier} block ids {ids.min()}..{ids.max()} leave the pool of {num_blocks} blocks")


def _spans(source_ids: Int32Array, destination_ids: Int32Array) -> Iterator[tuple[slice, slice]]:
    """Neighbouring ids joined: slices that are consecutive on both sides, so one copy moves many blocks."""
    breaks = np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(destination_ids) != 1)) + 1
    edges = [0, *breaks.tolist(), len(source_ids)]
    for start, end in itertools.pairwise(edges):
        if start < end:
            source, destination = int(source_ids[start]), int(destination_ids[start])
            yield slice(source, source + end - start), slice(destination, destination + end - start)
