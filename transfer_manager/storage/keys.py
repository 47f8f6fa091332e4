"""What objects in storage are called: a name is met again only by a cache that would compute the same bytes.

A key is the key space's digest and the block hash. The space holds all that decides a block's bytes beside its tokens:
weights, layout, block size, rank and world size; the block hash has tokens, extra keys and namespace in it
(`fastdeploy_cache.books.block_hash`). Where a namespace has a name, eight bytes of the hash say which one instead.
Digests are SHA-256 over msgpack of fixed fields, cut to 16 bytes.

The image of a hybrid model's checkpoint is stored in its pages, each an object as large as a block. They are named by
the hash of the block that ends at its boundary, which has all tokens in front of it in it, and by their place.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import NamedTuple, Self

import msgspec

from fastdeploy_cache.ipc.codec import taken_apart
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.parts import KVPart

KEY_VERSION = 1
NO_STOP, IMAGE_STOP, BARE_STOP = 0, 1, 2  # of a block: no request may go on behind it; by an image; by full KV alone
PAGE_MARK = b"fdc-page"  # what names of pages end with: that a block's hash does is one in 2^64
MARK_AT, MARK_BYTES = 16, 8  # of whose an object is, in its name: no beginning and no end of names is used up
PROBE_OWNER = bytes(MARK_BYTES)  # of the noise by which a store is tried
DIGEST = re.compile(r"[0-9a-f]{32}")
_KEY = re.compile(
    rf"(?P<prefix>fdc{KEY_VERSION}:(?P<weights>{DIGEST.pattern}):{DIGEST.pattern}:)(?P<hash>[0-9a-f]{{64}})"
)


class KeySpace(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's corner of a store. `layout` is `describe_image` of its blocks."""

    weights_id: str
    layout: str
    object_bytes: int
    block_size: int
    rank: int
    tp_size: int
    version: int = KEY_VERSION

    @classmethod
    def of(cls, weights_id: str, layout: RankLayout, block_size: int, rank: int, tp_size: int) -> Self:
        """The space of one rank's blocks."""
        return cls(
            weights_id=weights_id,
            layout=describe_image(layout),
            object_bytes=layout.block_bytes,
            block_size=block_size,
            rank=rank,
            tp_size=tp_size,
        )

    @classmethod
    def parse(cls, data: bytes | bytearray) -> Self | None:
        """What a store has written down of a space, as JSON; None where that cannot be read."""
        try:
            space: Self = msgspec.json.decode(data, type=taken_apart(cls))
            space.digest  # noqa: B018 (numbers that it has no room for are damage, too)
        except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError):  # `ValueError`: no UTF-8
            return None
        return space

    @property
    def weights_digest(self) -> str:
        """32 hexadecimal digits for the weights alone: what all spaces of these weights have in common."""
        return weights_digest_of(self.weights_id)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits for the whole space."""
        return _digest(msgspec.msgpack.encode(self))

    def key(self, block_hash: bytes) -> str:
        """The name of a block's object in a store of strings."""
        return f"{self.prefix}{block_hash.hex()}"

    @property
    def prefix(self) -> str:
        """What the keys of this space begin with."""
        return f"{weights_prefix(self.weights_id, self.version)}{self.digest}:"


class ObjectKey(NamedTuple):
    """A key of a store of strings, taken apart: what the keys of its space begin with, and what it is about."""

    prefix: str
    weights_digest: str
    block_hash: bytes

    @classmethod
    def parse(cls, key: str) -> Self | None:
        """Take a key apart; None where it is not an object's."""
        found = _KEY.fullmatch(key)
        return cls(found["prefix"], found["weights"], bytes.fromhex(found["hash"])) if found else None


def weights_digest_of(weights_id: str) -> str:
    """See `KeySpace.weights_digest`."""
    return _digest(weights_id.encode())


def weights_prefix(weights_id: str, version: int = KEY_VERSION) -> str:
    """What the keys of all spaces of these weights begin with."""
    return f"fdc{version}:{weights_digest_of(weights_id)}:"


def owner_mark(namespace: str) -> bytes:
    """Whose the objects of a namespace are: `TransferTask.owner`. Empty for the default one, whose names have none."""
    if not namespace:
        return b""
    return hashlib.sha256(b"fastdeploy_cache owner 1\0" + namespace.encode()).digest()[:MARK_BYTES]


def owned(name: bytes, owner: bytes) -> bytes:
    """The name of somebody's object: with their mark, by which all of these can be found."""
    return name[:MARK_AT] + owner + name[MARK_AT + MARK_BYTES :] if owner else name


def is_owned(name: bytes, owner: bytes) -> bool:
    """Whether a name has somebody's mark."""
    return name[MARK_AT : MARK_AT + MARK_BYTES] == owner


def page_names(block_hash: bytes, num_pages: int) -> list[bytes]:
    """The names of a checkpoint's pages in their order, 32 bytes each. They are counted from the end: the last page has
    the same name whatever their number is, so a look-up can ask for it alone."""
    heads = [hashlib.sha256(block_hash + place.to_bytes(4, "little")).digest()[:24] for place in range(num_pages)]
    return [head + PAGE_MARK for head in reversed(heads)]


def is_page(name: bytes) -> bool:
    """Whether an object is a page of a checkpoint, not a block."""
    return name.endswith(PAGE_MARK)


def describe_image(layout: RankLayout) -> str:
    """How a block's image in the CPU tier is made up, and of a hybrid model also that of a checkpoint; where the pieces
    lie on a device does not matter."""
    if not layout.layers:
        return f"{layout.num_layers} layers of {_described(layout.parts)}"
    layers = [f"{layout.rows[each.row]} layer of {_described(each.parts)}" for each in layout.layers]
    rows = ", ".join(map(str, layout.rows))  # in which order an image is packed
    return f"{'; '.join(layers)}; rows {rows}"


def _described(parts: Sequence[KVPart]) -> str:
    return ", ".join(f"{part.name} {part.dtype}{list(part.shape)} tokens at {part.token_axis}" for part in parts)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:32]
