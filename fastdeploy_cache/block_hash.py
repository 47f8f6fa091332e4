"""Names of blocks: SHA-256 chains over a fixed byte encoding.

``root  = sha256(b"fastdeploy_cache block hash 1" 0x00 | block_size as u32 LE | namespace as UTF-8)``
``block = sha256(parent's 32 bytes | the block's tokens as int32 LE)``

No environment variable, Python version or process changes them. They name blocks outside the tree; inside it, matching
compares tokens.
"""

from __future__ import annotations

import hashlib

HASH_BYTES = 32
_VERSION = b"fastdeploy_cache block hash 1\0"


def root_hash(namespace: str, block_size: int) -> bytes:
    """The parent of a namespace's first blocks."""
    return hashlib.sha256(_VERSION + block_size.to_bytes(4, "little") + namespace.encode()).digest()


def extend_hashes(parent: bytes, tokens: bytes | bytearray, block_bytes: int) -> bytes:
    """The hashes, joined, of the full blocks in `tokens` that follow a block with hash `parent`."""
    sha256 = hashlib.sha256
    hashes = []
    with memoryview(tokens) as view:
        for start in range(0, len(view) - block_bytes + 1, block_bytes):
            parent = sha256(parent + view[start : start + block_bytes]).digest()
            hashes.append(parent)
    return b"".join(hashes)
