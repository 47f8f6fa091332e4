"""How far a run and a prompt are the same: their tokens themselves are compared, so that no hash can collide."""

from __future__ import annotations

from fastdeploy_cache.books.block_keys import BlockKeys
from fastdeploy_cache.books.run import Run


def num_common(run: Run, offset: int, keys: BlockKeys, blocks: slice, size: int) -> int:
    """How many blocks of `run` from `offset` on equal these of `keys`, one after the other; extra keys, too. `size`: of
    a block, in bytes.

    Cost: a memcmp, and where they part a bisection whose pieces add up to another.
    """
    shift = blocks.start - offset
    high: int = min(run.num_blocks, blocks.stop - shift)
    theirs, start = keys.buffer(blocks.start * size, (high + shift) * size)
    with memoryview(run.tokens) as ours:
        if not theirs.startswith(ours[offset * size : high * size], start):
            high = _first_difference(ours, (offset, high), theirs, start - offset * size, size)
    if run.extras is not None or keys.extras is not None:
        own, other = run.extras or {}, keys.extras or {}
        high = next((b for b in range(offset, high) if own.get(b) != other.get(b + shift)), high)
    return high - offset


def _first_difference(view: memoryview, blocks: tuple[int, int], theirs: bytes, start: int, size: int) -> int:
    """The first of these blocks that `theirs`, from byte `start` on, has not; there is one."""
    low, high = blocks
    while high - low > 1:
        middle = (low + high) // 2
        if theirs.startswith(view[low * size : middle * size], start + low * size):
            low = middle
        else:
            high = middle
    return low
