"""What stands in a block's key for the images that overlap it.

For each, in the order of the prompt: offset in the prompt and length in tokens as u64 LE, the length of its hash as
u32 LE, and its hash.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

_HEAD = struct.Struct("<QQI")


def image_keys(images: Iterable[tuple[int, int, bytes]], block_size: int) -> dict[int, bytes]:
    """What is part of each block's key beside its tokens, by block; images are (offset, length, hash)."""
    extras: dict[int, bytes] = {}
    for offset, length, name in images:
        key = _HEAD.pack(offset, length, len(name)) + name
        for block in range(offset // block_size, (offset + length - 1) // block_size + 1):
            extras[block] = extras.get(block, b"") + key
    return extras


def images_in(key: bytes) -> list[tuple[int, int, bytes]]:
    """The images that a block's key tells of: the reverse. A key of another form, such as an engine's, has none."""
    found, at = list[tuple[int, int, bytes]](), 0
    while at < len(key):
        if at + _HEAD.size > len(key):
            return []
        offset, length, size = _HEAD.unpack_from(key, at)
        name = key[at + _HEAD.size : at + _HEAD.size + size]
        if len(name) < size:
            return []
        found.append((offset, length, name))
        at += _HEAD.size + size
    return found
