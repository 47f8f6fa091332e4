"""Copying the pieces of many blocks on the processor, in as few calls and as near to the speed of memory as it goes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from fastdeploy_cache.ipc.codec import Int32Array

Bytes = np.ndarray[Any, np.dtype[np.uint8]]

_CALL_BYTES = 8192  # what is copied in the time that a call takes: a block that has less is copied with others
_BUFFER_BYTES = 256 * 1024  # of these at a time, so that they stay in the processor's cache on their way


class Pairs(NamedTuple):
    """What a strip's bytes go to, and where they come from: [blocks, rows of pieces, bytes of a piece] each."""

    destinations: Bytes
    sources: Bytes


class Route:
    """Which blocks go where, in an order in which neighbours follow each other."""

    def __init__(self, source_ids: Int32Array, destination_ids: Int32Array) -> None:
        self.source_ids, self.destination_ids = source_ids, destination_ids

    def parts(self, num: int) -> list[Route]:
        """The same in so many parts, one behind the other."""
        sources, destinations = np.array_split(self.source_ids, num), np.array_split(self.destination_ids, num)
        return [Route(*ids) for ids in zip(sources, destinations, strict=True)]

    @cached_property
    def blocks(self) -> list[tuple[int, int]]:
        """Source and destination of each."""
        return list(zip(self.source_ids.tolist(), self.destination_ids.tolist(), strict=True))

    @cached_property
    def spans(self) -> list[tuple[slice, slice]]:
        """The same, blocks that are neighbours on both sides in one."""
        return list(self._find_spans())

    def _find_spans(self) -> Iterator[tuple[slice, slice]]:
        num_blocks = len(self.source_ids)
        breaks = np.flatnonzero((np.diff(self.source_ids) != 1) | (np.diff(self.destination_ids) != 1)) + 1
        for start, end in itertools.pairwise([0, *breaks.tolist(), num_blocks]) if num_blocks else ():
            source, destination = int(self.source_ids[start]), int(self.destination_ids[start])
            yield slice(source, source + end - start), slice(destination, destination + end - start)


def copy_pieces(pairs: Pairs, route: Route) -> None:
    """Copy the strip's pieces of all blocks. Other Python threads run meanwhile, but for an instant between calls."""
    destinations, sources = pairs
    num_bytes = math.prod(destinations.shape[1:])  # of a block; there may be none
    is_small = num_bytes <= _CALL_BYTES
    if is_small and len(route.blocks) * num_bytes < len(route.spans) * _CALL_BYTES:
        step = _BUFFER_BYTES // max(1, num_bytes)
        for first in range(0, len(route.blocks), step):
            some = slice(first, first + step)
            destinations[route.destination_ids[some]] = sources[route.source_ids[some]]
    elif is_small or (_are_joined(destinations) and _are_joined(sources)):
        for source, destination in route.spans:
            destinations[destination] = sources[source]
    else:
        # NumPy would go through a span in the order of its destinations, row by row of all its blocks if these lie on
        # the device. Images are read in one go instead.
        for origin, target in route.blocks:
            destinations[target] = sources[origin]


def _are_joined(blocks: Bytes) -> bool:
    """Whether each block is one piece, and begins where the one before ends."""
    return bool(blocks.shape[1:] == blocks.strides[:1])
