"""Short marks of blocks, and keys of their places, by which a prompt is compared with what is gone.

They tell blocks apart and prove nothing: they serve explanations, and never decide what is read. Only this process
understands them.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Callable, Mapping
from typing import Final

MARK_BYTES: Final = 4
WINDOW_BYTES: Final = 64  # as in `_native.c`
BlockMarks = Callable[[bytes | bytearray, int, int, int], bytes]
PlaceKey = Callable[[bytes | bytearray, int, bytes | bytearray, int, int], int]


def word_of(*parts: bytes | bytearray | int) -> int:
    """64 bits of them, the same in every process: what a hash of Python's own gives depends on the environment.

    0 of no bytes at all, which so leaves a key as it is that this is mixed into.
    """
    whole = b"".join([part.to_bytes(8, "little") if isinstance(part, int) else part for part in parts])
    return int.from_bytes(hashlib.blake2b(whole, digest_size=8).digest(), "little") if whole else 0


def block_marks_in_python(tokens: bytes | bytearray, start: int, num_blocks: int, block_bytes: int, /) -> bytes:
    """The marks of `num_blocks` blocks of `block_bytes` packed tokens, from the byte `start` on, one after the other.

    Raises `ValueError` where they lie outside of the tokens.
    """
    end = start + num_blocks * block_bytes
    if start < 0 or num_blocks < 0 or block_bytes <= 0 or end > len(tokens):
        raise ValueError(f"block_marks of the bytes [{start}, {end}) of {len(tokens)}")
    with memoryview(tokens) as view:
        pieces = [zlib.crc32(view[at : at + block_bytes]) for at in range(start, end, block_bytes)]
    return b"".join([piece.to_bytes(MARK_BYTES, "little") for piece in pieces])


def place_key_in_python(
    root: bytes | bytearray, block: int, tokens: bytes | bytearray, start: int, block_bytes: int, /
) -> int:
    """64 bits for the block that begins at the byte `start` of `tokens`.

    Of its namespace's hash `root`, of its number in the prompt, of its tokens, and of the `WINDOW_BYTES` in front of
    it, or what there is of them.

    Raises `ValueError` where it lies outside of the tokens.
    """
    mark = block_marks_in_python(tokens, start, 1, block_bytes)
    return word_of(root, block, tokens[max(0, start - WINDOW_BYTES) : start], mark)


_block_marks: BlockMarks
_place_key: PlaceKey
try:
    from fastdeploy_cache._native import block_marks as _block_marks
    from fastdeploy_cache._native import place_key as _place_key
except ImportError:  # they were not built
    _block_marks, _place_key = block_marks_in_python, place_key_in_python
block_marks: Final[BlockMarks] = _block_marks  # the faster ones
place_key: Final[PlaceKey] = _place_key


def with_extras(marks: bytes, extras: Mapping[int, bytes], first: int) -> bytes:
    """The marks of the blocks from `first` on, in which equal tokens of other images differ.

    `extras`: what is part of the keys of some blocks beside their tokens, by block.
    """
    mixed, end = bytearray(marks), first + len(marks) // MARK_BYTES
    for block, extra in extras.items():
        if first <= block < end:
            at = (block - first) * MARK_BYTES
            mark = int.from_bytes(mixed[at : at + MARK_BYTES], "little") ^ zlib.crc32(extra)
            mixed[at : at + MARK_BYTES] = mark.to_bytes(MARK_BYTES, "little")
    return bytes(mixed)


def num_equal(marks: bytes, others: bytes) -> int:
    """How many blocks from the front have the same marks."""
    end = min(len(marks), len(others))
    if marks[:end] == others[:end]:
        return end // MARK_BYTES
    low, high = 0, end // MARK_BYTES
    while high - low > 1:
        middle = (low + high) // 2
        if marks[low * MARK_BYTES : middle * MARK_BYTES] == others[low * MARK_BYTES : middle * MARK_BYTES]:
            low = middle
        else:
            high = middle
    return low
