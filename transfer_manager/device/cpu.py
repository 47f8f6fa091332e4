"""The device for machines without an accelerator: KV arrays in shared memory, copied by the processor."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import numpy as np
from numpy.lib.stride_tricks import as_strided

from fastdeploy_cache.ipc.codec import Int32Array
from fastdeploy_cache.transfer_manager.crew import Crew
from fastdeploy_cache.transfer_manager.device.base import Device, check_ids, check_unit_ids, wiped_bytes
from fastdeploy_cache.transfer_manager.device.images import CheckpointImage, ImageMap, ImageMove, UnitPieces
from fastdeploy_cache.transfer_manager.device.pieces import Bytes, Pairs, Route, copy_pieces
from fastdeploy_cache.transfer_manager.device.strips import Step, Strip, leading_strips, load_steps, whole_step
from fastdeploy_cache.transfer_manager.kv.layout import Places, RankLayout
from fastdeploy_cache.transfer_manager.task import Lane, TaskKind

_STREAMED_BYTES = 20 * 1024  # glibc takes no less than 16.1 KiB
_SHARED_BYTES = 4 * 2**20  # copying less takes hardly longer than another thread to wake up
_JOB_BYTES = 4 * 2**20  # of these each of two threads takes the next: more of them cost more, fewer balance less
_MIN_JOBS = 4
_TUNABLES, _STREAMED = "GLIBC_TUNABLES", "glibc.cpu.x86_non_temporal_threshold"


def streaming_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """What a process that copies by the processor needs in its environment, beside that of its parent.

    A piece that memcpy writes past the caches goes through memory twice, and thrice otherwise: what is overwritten is
    read before. The C library does so from about the size of the caches on, which a piece of a block never has.
    Source: glibc's manual, "Hardware Capability Tunables"; other libraries and processors pass the variable by.
    """
    known = environment.get(_TUNABLES, "")
    if _STREAMED in known:  # somebody knows better
        return {}
    return {_TUNABLES: ":".join(filter(None, (known, f"{_STREAMED}={_STREAMED_BYTES}")))}


_Steps = list[tuple[int, list[Pairs]]]  # so many layers are in when these have been copied


class CpuDevice(Device):
    """See `transfer_manager.device.base.Device`. NumPy copies piece by piece, without the interpreter's lock.

    Copies of different lanes may run in two threads at a time, and each may have another one that helps.
    """

    def __init__(
        self,
        layout: RankLayout,
        segments: Sequence[Bytes],
        places: Places,
        images: Bytes,
        num_gpu_blocks: int,
        *,
        may_share: bool = False,
    ) -> None:
        """`segments` are the pieces of the KV memory as flat bytes; `images` is [CPU blocks, layout.block_bytes].

        `may_share`: a second thread helps with large copies. A core waits for memory at the beginning of each piece,
        and two cores do so at the same time.
        """
        self._num_gpu_blocks, self._num_cpu_blocks = num_gpu_blocks, len(images)
        self._block_bytes = layout.block_bytes
        self._layout, self._places, self._segments = layout, places, segments
        self._images = images.reshape(-1)
        self._map = ImageMap(layout, places, len(images))
        self._load: _Steps = [(step.num_layers, list(self._into_device(step))) for step in load_steps(layout, places)]
        (whole,) = whole_step(layout, places)
        self._store = [
            (whole.num_layers, [Pairs(pair.sources, pair.destinations) for pair in self._into_device(whole)])
        ]
        self._crews = {lane: Crew(2, "copy") for lane in Lane} if may_share else {}

    def _into_device(self, step: Step) -> Iterator[Pairs]:
        for strip in step.strips:
            shape, strides = (self._num_cpu_blocks, *strip.shape), (self._block_bytes, *strip.image_strides)
            yield Pairs(
                self._pieces(strip, self._num_gpu_blocks),
                as_strided(self._images[strip.image_offset_bytes :], shape, strides),
            )

    def _num_pieces(self, row: int) -> int:
        return self._layout.num_units[row - 1] if row else self._num_gpu_blocks

    def _pieces(self, strip: Strip, num_blocks: int) -> Bytes:
        shape, strides = (num_blocks, *strip.shape), (strip.block_stride_bytes, *strip.strides)
        return as_strided(self._segments[strip.segment][strip.offset_bytes :], shape, strides)

    def copy(
        self,
        kind: TaskKind,
        source_ids: Int32Array,
        destination_ids: Int32Array,
        on_layer: Callable[[int], None],
        num_tokens: int | None = None,
    ) -> int:
        check_ids(kind, source_ids, destination_ids, self._num_gpu_blocks, self._num_cpu_blocks)
        # Pieces on the device are far apart but for those of its neighbours: these follow each other.
        order = np.argsort(source_ids if kind is TaskKind.SWAP_OUT else destination_ids, kind="stable")
        route = Route(source_ids[order], destination_ids[order])
        if kind is TaskKind.COPY:
            num_bytes = self._copy_leading(route, num_tokens)
            on_layer(self._layout.num_layers)
            return len(source_ids) * num_bytes
        steps = self._load if kind is TaskKind.SWAP_IN else self._store
        num_bytes = len(source_ids) * self._block_bytes
        if kind.lane in self._crews and num_bytes > _SHARED_BYTES:
            self._copy_together(self._crews[kind.lane], steps, route, on_layer)
        else:
            for num_layers, pairs in steps:
                _copy(pairs, route)
                on_layer(num_layers)
        return num_bytes

    def _copy_together(self, crew: Crew, steps: _Steps, route: Route, on_layer: Callable[[int], None]) -> None:
        num_blocks = len(route.source_ids)
        num_parts = max(num_blocks * self._block_bytes // len(steps) // _JOB_BYTES, -(-_MIN_JOBS // len(steps)))
        num_parts = min(num_parts, num_blocks)
        parts = route.parts(num_parts)
        unsaid = iter(steps)
        num_told = 0

        def on_done(num_jobs: int) -> None:
            nonlocal num_told
            for num_layers, _ in itertools.islice(unsaid, num_jobs // num_parts - num_told):
                on_layer(num_layers)
            num_told = num_jobs // num_parts

        crew.run([partial(_copy, pairs, part) for _, pairs in steps for part in parts], on_done)

    def copy_units(
        self, row: int, source_ids: Int32Array, destination_ids: Int32Array, num_tokens: int | None = None
    ) -> int:
        check_unit_ids(self._layout, row, source_ids, destination_ids)
        return len(source_ids) * self._copy_leading(Route(source_ids, destination_ids), num_tokens, row)

    def _copy_leading(self, route: Route, num_tokens: int | None, row: int = 0) -> int:
        """Copy whole blocks, or their first tokens, within the GPU. Returns the bytes of one block that were copied."""
        num_bytes = 0
        for strip in leading_strips(self._layout, self._places, num_tokens, row):
            pieces = self._pieces(strip, self._num_pieces(row))
            copy_pieces(Pairs(pieces, pieces), route)
            num_bytes += strip.num_bytes
        return num_bytes

    def wipe(self, gpu_ids: Int32Array, cpu_ids: Int32Array, row: int = 0) -> int:
        num_blocks = self._num_gpu_blocks, self._num_cpu_blocks
        num_bytes = wiped_bytes(self._layout, row, gpu_ids, cpu_ids, num_blocks)
        for strip in leading_strips(self._layout, self._places, None, row):
            self._pieces(strip, self._num_pieces(row))[gpu_ids] = 0
        self._images.reshape(self._num_cpu_blocks, self._block_bytes)[cpu_ids] = 0
        return num_bytes

    def move_image(self, kind: TaskKind, image: CheckpointImage, on_layer: Callable[[int], None]) -> ImageMove:
        steps = self._map.steps(kind, image)
        if kind is TaskKind.SWAP_OUT:
            self._images[self._map.rest(image)] = 0
        for step in steps:
            self._move(step.pieces, is_load=kind is TaskKind.SWAP_IN, crew=self._crews.get(kind.lane))
            on_layer(step.num_layers)
            if step is not steps[-1]:
                yield
        return self._map.num_bytes(image)

    def _move(self, pieces: UnitPieces, *, is_load: bool, crew: Crew | None) -> None:
        if crew is None or pieces.num_bytes.sum() <= _SHARED_BYTES:
            self._move_each(pieces, is_load)
        else:
            crew.run([partial(self._move_each, share, is_load) for share in pieces.shares(_JOB_BYTES)])

    def _move_each(self, pieces: UnitPieces, is_load: bool) -> None:
        images, segments = self._images, self._segments
        for segment, begin, at, size in zip(*(column.tolist() for column in pieces), strict=True):
            if is_load:
                segments[segment][begin : begin + size] = images[at : at + size]
            else:
                images[at : at + size] = segments[segment][begin : begin + size]

    def close(self) -> None:
        """Let the memory go."""
        for crew in self._crews.values():
            crew.close()
        self._crews, self._load, self._store, self._segments = {}, [], [], ()
        self._images = np.empty(0, np.uint8)


def _copy(pairs: Sequence[Pairs], route: Route) -> None:
    for each in pairs:
        copy_pieces(each, route)
