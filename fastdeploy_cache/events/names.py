"""What blocks are called outside of this cache: by our own hashes, or by those of vLLM."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from fastdeploy_cache.books.block_hash import HASH_BYTES, TOKEN_BYTES, BlockHasher, root_hash
from fastdeploy_cache.books.image_keys import image_keys, images_in
from fastdeploy_cache.books.tokens import TokenIds, pack
from fastdeploy_cache.errors import ConfigError, RequestError

Image = tuple[int, int, bytes | str]  # offset in the prompt, length in tokens, and hash
NameKind = Literal["own", "sha256_cbor"]
NameForm = Literal["bytes", "int64"]
_LAST_64_BITS = 2**64 - 1
VLLM_SEED = "vllm-none-hash"  # vLLM's own default for algorithms that resist collisions


class Extra(NamedTuple):
    """What tells a block apart beside its tokens.

    Attributes:
        key: as the tree has it.
        images: the hash of each, as text, and how many tokens behind the block's begin it begins.
    """

    key: bytes
    images: tuple[tuple[str, int], ...]


Extras = Mapping[int, Extra]


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


def extras_of(keys: Mapping[int, bytes], first: int, block_size: int) -> dict[int, Extra]:
    """What keys of images tell, by block; block 0 is the block `first` of the prompt."""
    found = dict[int, Extra]()
    for block, key in keys.items():
        begin = (first + block) * block_size
        images = tuple([(_text_of(name), offset - begin) for offset, _, name in images_in(key)])
        found[block] = Extra(key, images)
    return found


def _text_of(name: bytes) -> str:
    """What vLLM has as text is its identifier of the content; other bytes are no name that it knows."""
    try:
        return name.decode()
    except UnicodeDecodeError:
        return f"hex:{name.hex()}"


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
        keys = {block: extra.key for block, extra in extras.items()} if extras is not None else None
        return self._hasher.extend(parent, tokens, 0, num_blocks, keys)


class VllmNames:
    """SHA-256 of canonical CBOR of (the parent's digest, the tokens, the extra keys), as in `vllm.v1.core`.

    The salt of a namespace stands on its first block, as a request's `cache_salt` does there. An image whose hash is
    vLLM's identifier, as text, has vLLM's extra key, in which its length does not count.
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
        whole = np.frombuffer(tokens, "<i4", num_blocks * self._block_size)
        ids = whole.reshape(num_blocks, self._block_size).tolist()
        digests = []
        for block, of_block in enumerate(ids):
            keys: list[tuple[object, ...]] = []
            if extras is not None and block in extras:
                extra = extras[block]
                keys += [("mm", *image) for image in extra.images] or [("image", extra.key)]
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
    images: Sequence[Image] = (),
) -> list[bytes] | list[int]:
    """The published names of a prompt's full blocks. Raises `RequestError` (a `ValueError`): bad tokens or images."""
    packed, size = pack("prompt", token_ids), scheme.block_size
    try:
        each = [(offset, length, name.encode() if isinstance(name, str) else name) for offset, length, name in images]
        extras = extras_of(image_keys(each, size), 0, size) if each else None
    except (TypeError, ValueError, struct.error) as error:
        raise RequestError(f"images {images!r}: {error}; give (offset, length, hash) of each") from error
    return scheme.outside(naming.extend(naming.root(namespace), packed, extras, namespace))
