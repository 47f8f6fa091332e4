"""What a path from the root down has on the GPU, on its way there, and below; and where a request can go on."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Protocol

from fastdeploy_cache.books.run import CPU, GPU, Run
from fastdeploy_cache.books.transfer import Transfer, segments_of

Part = tuple[Run, int, int]  # a run, its first block, number of blocks


class PromptImages(Protocol):
    """What a request's prompt says about where the request can go on."""

    @property
    def images(self) -> Sequence[object]: ...

    def whole_images(self, num_blocks: int, block_size: int) -> int:
        """The most blocks up to `num_blocks` whose end lies inside no image."""
        ...


def usable_end(prompt: PromptImages, num_blocks: int, block_size: int) -> int:
    """Return how many of the first `num_blocks` blocks, which are cached, a request can go on behind."""
    return prompt.whole_images(num_blocks, block_size)


def gpu_ids(path: list[Run], num_blocks: int) -> array[int]:
    """The ids of those of a path's first `num_blocks` blocks that are on the GPU: the leading ones, as residency is
    prefix-closed."""
    ids = array("i")
    for run in path:
        ids.frombytes(run.gpu)
    del ids[num_blocks:]
    return ids


def num_gpu(path: list[Run], num_blocks: int) -> int:
    """How many of a path's first `num_blocks` blocks are on the GPU. It asks for no memory. Of a path that was found,
    these are no more than were found: behind them its last run may go on with another prompt."""
    return min(num_blocks, sum(run.num_gpu for run in path))


def coming_and_cold(path: list[Run], num_blocks: int) -> tuple[int, list[Part]]:
    """Behind the blocks on the GPU, up to `num_blocks`: how many are being loaded by others, and what nobody loads yet.

    Behind the first part that nobody loads, everything counts as such: a load in flight there lands before ours, finds
    its parent missing, and is dropped.
    """
    num_coming = 0
    parts: list[Part] = []
    for run in path:
        length = min(num_blocks, run.num_blocks)
        num_blocks -= length
        end = min(run.num_gpu, length)
        if not parts:
            for segment in sorted(segments_of(run, GPU), key=lambda s: s.start):
                if segment.start <= end:
                    end = min(max(end, segment.end), length)
            num_coming += end - min(run.num_gpu, length)
        if end < length:
            parts.append((run, end, length - end))
    return num_coming, parts


def coming_ids(path: list[Run], first: int, num_blocks: int) -> tuple[array[int], list[Transfer]]:
    """Where blocks [first, num_blocks) of a path are or will be on the GPU, up to the first that nobody loads, and the
    loads that bring them."""
    ids, depth = array("i"), 0
    transfers: dict[Transfer, None] = {}
    for run in path:
        segments, here = segments_of(run, GPU), run.ids_in(GPU)
        for block in range(max(0, first - depth), min(run.num_blocks, num_blocks - depth)):
            if block < len(here):
                ids.append(here[block])
                continue
            segment = next((s for s in segments if s.start <= block < s.end), None)
            if segment is None:
                return ids, list(transfers)
            ids.append(segment.ids[block - segment.start])
            transfers[segment.transfer] = None
        depth += run.num_blocks
    return ids, list(transfers)


def cpu_ids(path: list[Run], first: int, num_blocks: int) -> array[int]:
    """The CPU blocks of blocks [first, num_blocks) of a path, up to the first without."""
    ids, depth = array("i"), 0
    for run in path:
        start, end = max(0, first - depth), min(run.num_blocks, num_blocks - depth)
        if start < end:
            if start < run.cpu_start:
                return ids
            ids += run.ids_in(CPU, start - run.cpu_start, end - run.cpu_start)
            if end > run.cpu_end:
                return ids
        depth += run.num_blocks
    return ids
