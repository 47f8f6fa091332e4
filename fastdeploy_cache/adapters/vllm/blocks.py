"""The early names of vLLM's block books: a block, the queue of free ones, chained hashes.

They stand by themselves, for an engine that keeps its own books. The manager of this adapter keeps none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from fastdeploy_cache.books.block_hash import HASH_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.tokens import TokenIds
from fastdeploy_cache.errors import RequestError
from fastdeploy_cache.request import Request


class BlockHashType(NamedTuple):
    """A full block's name: the hash of all tokens up to its end, and its own tokens."""

    hash_value: bytes
    token_ids: tuple[int, ...]


def hash_block_tokens(
    parent_block_hash: BlockHashType | bytes | int | None,
    curr_block_token_ids: TokenIds,
    extra_key: bytes = b"",
    *,
    namespace: str = "",
) -> BlockHashType:
    """The hash of a block of these tokens behind `parent_block_hash`; None: it is the first of `namespace`.

    The cache's own chain (`fastdeploy_cache.books.block_hash`). The parent is a block's hash, or its `hash_value`; an
    integer stands for its 32 bytes, little-endian and signed.

    Raises:
        RequestError: no tokens, a token id out of range, a parent of other than 32 bytes.
    """
    request = _packed(curr_block_token_ids, namespace)
    parent = root_hash(namespace, request.num_tokens) if parent_block_hash is None else parent_block_hash
    if isinstance(parent, BlockHashType):
        parent = parent.hash_value
    if isinstance(parent, int):
        parent = parent.to_bytes(HASH_BYTES, "little", signed=True)
    if len(parent) != HASH_BYTES:
        raise RequestError(f"parent hash has {len(parent)} bytes; give the {HASH_BYTES} of a hash_value")
    return _hashes(request, parent, request.num_tokens, {0: extra_key})[0]


def hash_request_tokens(
    block_size: int, token_ids: TokenIds, extra_keys: Mapping[int, bytes] | None = None, *, namespace: str = ""
) -> list[BlockHashType]:
    """The hashes of the full blocks of a sequence; what is left over has none.

    `extra_keys`, by block: what is part of its name beside its tokens, such as `Request.extra_keys` of images.

    Raises:
        RequestError: a token id out of range, a block size below 1.
    """
    if block_size < 1:
        raise RequestError(f"block_size is {block_size}; give 1 or more tokens")
    if len(token_ids) < block_size:
        return []
    return _hashes(_packed(token_ids, namespace), root_hash(namespace, block_size), block_size, extra_keys or {})


def _packed(token_ids: TokenIds, namespace: str) -> Request:
    return Request(request_id="of tokens to hash", prompt_token_ids=token_ids, namespace=namespace)


def _hashes(request: Request, parent: bytes, size: int, extras: Mapping[int, bytes]) -> list[BlockHashType]:
    num_blocks = request.num_tokens // size
    joined = BlockHasher(size).extend(parent, request.tokens, 0, num_blocks, extras)
    tokens = np.frombuffer(request.tokens, "<i4").tolist()
    return [
        BlockHashType(joined[i * HASH_BYTES : (i + 1) * HASH_BYTES], tuple(tokens[i * size : (i + 1) * size]))
        for i in range(num_blocks)
    ]


@dataclass(slots=True, eq=False)
class KVCacheBlock:
    """What an engine notes of a block. Two blocks are the same only if they are one object."""

    block_id: int
    ref_cnt: int = 0
    token_ids: list[int] = field(default_factory=list)
    block_hash: BlockHashType | None = None
    num_hashed_tokens: int = 0  # of the sequence, up to its end
    prev_free_block: KVCacheBlock | None = field(default=None, repr=False)  # these two are the queue's
    next_free_block: KVCacheBlock | None = field(default=None, repr=False)

    def reset(self) -> None:
        """Forget all but the id and the place in the queue."""
        self.ref_cnt, self.token_ids, self.block_hash, self.num_hashed_tokens = 0, [], None, 0


class FreeKVCacheBlockQueue:
    """Free blocks, first to be given out first: in the order given, then in the order in which they come back.

    Give a request's blocks back last one first: the tail of a chain goes before its head. Every verb but `__init__` and
    `get_all_free_blocks` is O(1). One thread at a time.
    """

    def __init__(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Raises `RuntimeError` where a block is there twice."""
        self.free_list_head: KVCacheBlock | None = None
        self.free_list_tail: KVCacheBlock | None = None
        self._linked: set[int] = set()  # by identity: links alone cannot tell a queue's only block from one in none
        for block in blocks:
            self.append(block)

    @property
    def num_free_blocks(self) -> int:
        """Blocks in the queue."""
        return len(self._linked)

    def popleft(self) -> KVCacheBlock:
        """Take the first block. Raises `ValueError` when there is none."""
        block = self.free_list_head
        if block is None:
            raise ValueError("no free block is left; give some back first")
        self.remove(block)
        return block

    def remove(self, block: KVCacheBlock) -> None:
        """Take a block from wherever it is. Raises `RuntimeError` when it is not in this queue."""
        if id(block) not in self._linked:
            raise RuntimeError(f"block {block.block_id} is not in this queue; remove what is free, once")
        before, behind = block.prev_free_block, block.next_free_block
        if before is None:
            self.free_list_head = behind
        else:
            before.next_free_block = behind
        if behind is None:
            self.free_list_tail = before
        else:
            behind.prev_free_block = before
        block.prev_free_block = block.next_free_block = None
        self._linked.remove(id(block))

    def append(self, block: KVCacheBlock) -> None:
        """Put a block last. Raises `RuntimeError` when it is in this queue already, or linked in another."""
        if id(block) in self._linked or block.prev_free_block is not None or block.next_free_block is not None:
            raise RuntimeError(f"block {block.block_id} is in a queue already; append it once")
        last = self.free_list_tail
        if last is None:
            self.free_list_head = block
        else:
            last.next_free_block, block.prev_free_block = block, last
        self.free_list_tail = block
        self._linked.add(id(block))

    def get_all_free_blocks(self) -> list[KVCacheBlock]:
        """All of them, first to last."""
        blocks, block = [], self.free_list_head
        while block is not None:
            blocks.append(block)
            block = block.next_free_block
        return blocks
