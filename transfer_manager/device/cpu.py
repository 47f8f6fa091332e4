"""The device for machines without an accelerator: KV arrays in shared memory, copied by the processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.device.base import check_ids
from fastdeploy_cache.transfer_manager.device.strips import Step, Strip, leading_strips, load_steps, whole_step
from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout
from fastdeploy_cache.transfer_manager.task import TaskKind

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_Pairs = list[tuple[Bytes, Bytes]]  # pieces on the device, the same inside the images: [blocks, rows, row bytes] each


class CpuDevice:
    """See `transfer_manager.device.base.Device`. NumPy copies piece by piece, without the interpreter's lock.

    Copies of different lanes may run in two threads at a time.
    """

    def __init__(
        self,
        layout: RankLayout,
        segments: Sequence[Bytes],
        places: Places,
        images: Bytes,
        num_gpu_blocks: int,
    ) -> None:
        """`segments` are the pieces of the KV memory as flat bytes; `images` is [CPU blocks, layout.block_bytes]."""
        self._num_gpu_blocks, self._num_cpu_blocks = num_gpu_blocks, len(images)
        self._block_bytes = layout.block_bytes
        self._layout, self._places, self._segments = layout, places, segments
        self._load = [(step.num_layers, self._pairs(step, images)) for step in load_steps(layout, places)]
        self._store = self._pairs(whole_step(layout, places)[0], images)

    def _pairs(self, step: Step, images: Bytes) -> _Pairs:
        return [(self._pieces(strip), _in_images(images, strip)) for strip in step.strips]

    def _pieces(self, strip: Strip) -> Bytes:
        return np.lib.stride_tricks.as_strided(
            self._segments[strip.segment][strip.offset_bytes :],
            (self._num_gpu_blocks, strip.num_rows, strip.row_bytes),
            (strip.block_stride_bytes, strip.row_stride_bytes, 1),
        )

    def copy(
        self,
        kind: TaskKind,
        source_ids: Int32Array,
        destination_ids: Int32Array,
        on_layer: Callable[[int], None],
        num_tokens: int | None = None,
    ) -> int:
        check_ids(kind, source_ids, destination_ids, self._num_gpu_blocks, self._num_cpu_blocks)
        spans = list(_spans(source_ids, destination_ids))
        if kind is TaskKind.SWAP_IN:
            for num_layers, pairs in self._load:
                for pieces, images in pairs:
                    _copy(pieces, images, spans)
                on_layer(num_layers)
        elif kind is TaskKind.SWAP_OUT:
            for pieces, images in self._store:
                _copy(images, pieces, spans)
            on_layer(self._layout.num_layers)
        else:
            num_bytes = self._copy_leading(spans, num_tokens)
            on_layer(self._layout.num_layers)
            return len(source_ids) * num_bytes
        return len(source_ids) * self._block_bytes

    def _copy_leading(self, spans: Sequence[tuple[slice, slice]], num_tokens: int | None) -> int:
        """Copy whole blocks, or their first tokens, within the GPU. Returns the bytes of one block that were copied."""
        num_bytes = 0
        for strip in leading_strips(self._layout, self._places, num_tokens):
            pieces = self._pieces(strip)
            _copy(pieces, pieces, spans)
            num_bytes += strip.num_rows * strip.row_bytes
        return num_bytes

    def bind_thread(self) -> None:
        pass

    @property
    def is_lost(self) -> bool:
        return False

    def close(self) -> None:
        """Let the memory go."""
        self._load, self._store, self._segments = [], [], ()


def _in_images(images: Bytes, strip: Strip) -> Bytes:
    start = strip.image_offset_bytes
    columns = images[:, start : start + strip.num_rows * strip.row_bytes]
    return columns.reshape(len(images), strip.num_rows, strip.row_bytes)


def _copy(destinations: Bytes, sources: Bytes, spans: Sequence[tuple[slice, slice]]) -> None:
    for source, destination in spans:
        destinations[destination] = sources[source]


def _spans(source_ids: Int32Array, destination_ids: Int32Array) -> Iterator[tuple[slice, slice]]:
    """Neighbouring ids joined: slices that are consecutive on both sides, so one copy moves many blocks."""
    if not len(source_ids):
        return
    breaks = np.flatnonzero((np.diff(source_ids) != 1) | (np.diff(destination_ids) != 1)) + 1
    edges = [0, *breaks.tolist(), len(source_ids)]
    for start, end in itertools.pairwise(edges):
        source, destination = int(source_ids[start]), int(destination_ids[start])
        yield slice(source, source + end - start), slice(destination, destination + end - start)
