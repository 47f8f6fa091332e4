"""What blocks are called outside of this cache: by our own hashes, or by those of vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Protocol

import msgspec
import numpy as np

from fastdeploy_cache.books.block_hash import HASH_BYTES, TOKEN_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.tokens import TokenIds, pack
from fastdeploy_cache.errors import ConfigError

Extras = Mapping[int, bytes]
NameKind = Literal["own", "sha256_cbor"]
NameForm = Literal["bytes", "int64"]
_LAST_64_BITS = 2**64 - 1
VLLM_SEED = "vllm-none-hash"  # vLLM's own default for algorithms that resist collisions


class NameScheme(msgspec.Struct, frozen=True, kw_only=True):
    """How blocks are named; a publisher tells its subscribers.

    Attributes:
        kind: `own` hashes as `fastdeploy_cache.books.block_hash`; `sha256_cbor` as vLLM does under that name.
        form: a name is the digest itself, or its last 64 bits as a number, as vLLM publishes them by default.
        seed: of `sha256_cbor`: vLLM's PYTHONHASHSEED where that is set, else `VLLM_SEED`.
        block_size: tokens in a block.
    """

    kind: NameKind = "own"
    form: NameForm = "bytes"
    seed: str = VLLM_SEED
    block_size: Annotated[int, msgspec.Meta(ge=1, le=2**20)] = 64

    def names(self) -> BlockNaming:
        """What makes the names. Raises `ConfigError`: a library is missing."""
        return OwnNames(self.block_size) if self.kind == "own" else VllmNames(self.block_size, self.seed)

    def outside(self, digests: bytes | bytearray) -> list[bytes] | list[int]:
        """Names as they are published, of joined digests."""
        each = [bytes(digests[at : at + HASH_BYTES]) for at in range(0, len(digests), HASH_BYTES)]
        if self.form == "bytes":
            return each
        return [int.from_bytes(digest, "big") & _LAST_64_BITS for digest in each]


class BlockNaming(Protocol):
    """Makes the digests of blocks in a row. Any thread."""

    def root(self, namespace: str) -> bytes:
        """The digest that stands before the first block of a namespace."""
        ...

    def extend(self, parent: bytes, tokens: bytes | bytearray, extras: Extras | None, salt: str) -> bytes:
        """Joined digests of the blocks of `tokens` (int32, little-endian) behind `parent`.

        `extras`: their extra keys, by place. `salt`: of the namespace, where the first of them begins a prompt.
        """
        ...


class OwnNames:
    """See `fastdeploy_cache.books.block_hash`."""

    def __init__(self, block_size: int) -> None:
        self._block_size, self._hasher = block_size, BlockHasher(block_size)

    def root(self, namespace: str) -> bytes:
        """See `BlockNaming`."""
        return root_hash(namespace, self._block_size)

    def extend(self, parent: bytes, tokens: bytes | bytearray, extras: Extras | None, salt: str) -> bytes:  # noqa: ARG002
        """See `BlockNaming`. The salt is in the root."""
        num_blocks = len(tokens) // TOKEN_BYTES // self._block_size
        return self._hasher.extend(parent, tokens, 0, num_blocks, extras)


class VllmNames:
    """SHA-256 of canonical CBOR of (the parent's digest, the tokens, the extra keys), as in `vllm.v1.core`.

    The salt of a namespace stands on its first block, as a request's `cache_salt` does there. Extra keys of images are
    our own bytes: a block with an image has another name than under vLLM, and never that of another block.
    """

    def __init__(self, block_size: int, seed: str) -> None:
        """Raises `ConfigError`: the package cbor2 is missing."""
        try:
            import cbor2  # late: an extra
        except ImportError as error:
            raise ConfigError(
                "events.block_names is 'sha256_cbor', which needs the package cbor2; "
                "install fastdeploy-cache[vllm-names], or use 'own'"
            ) from error
        self._dumps: Any = cbor2.dumps
        self._block_size = block_size
        self._none = self._digest(seed)

    def root(self, namespace: str) -> bytes:  # noqa: ARG002 (the salt of the first block tells it)
        """See `BlockNaming`."""
        return self._none

    def extend(self, parent: bytes, tokens: bytes | bytearray, extras: Extras | None, salt: str) -> bytes:
        """See `BlockNaming`."""
        num_blocks = len(tokens) // TOKEN_BYTES // self._block_size
        ids = np.frombuffer(tokens, "<i4", num_blocks * self._block_size).reshape(num_blocks, -1).tolist()
        digests = []
        for block, of_block in enumerate(ids):
            keys: list[tuple[str, object]] = []
            if extras is not None and block in extras:
                keys.append(("image", extras[block]))
            if salt and not block:
                keys.append(("cache_salt", salt))
            parent = self._digest((parent, tuple(of_block), tuple(keys) or None))
            digests.append(parent)
        return b"".join(digests)

    def _digest(self, value: object) -> bytes:
        return hashlib.sha256(self._dumps(value, canonical=True)).digest()


def name_blocks(
    scheme: NameScheme,
    naming: BlockNaming,
    token_ids: TokenIds,
    namespace: str = "",
    extras: Extras | None = None,
) -> list[bytes] | list[int]:
    """The published names of a prompt's full blocks. Raises `RequestError` (a `ValueError`): these are no tokens."""
    packed = pack("prompt", token_ids)
    return scheme.outside(naming.extend(naming.root(namespace), packed, extras, namespace))
