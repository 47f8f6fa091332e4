"""What a prefill instance hands out for one request: who has the blocks, and what they are."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import Annotated

import msgspec

from fastdeploy_cache.errors import CodecError, LayoutError, PeerRefusedError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.transfer_manager.kv.groups import rows_of
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout

OFFER_VERSION = 1
GROUPS_VERSION = 2  # of an offer whose layout has groups: who knows no groups would take its blocks for whole ones
ID_BYTES = 16
_Id = Annotated[bytes, msgspec.Meta(min_length=ID_BYTES, max_length=ID_BYTES)]
_Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]


class InstanceInfo(msgspec.Struct, frozen=True, kw_only=True):
    """An instance as others see it. `instance_id` is random: one that is started again is another.

    `addresses` are of its ranks' control sockets; `public_key` (Z85) is what they prove over TCP.
    """

    instance_id: _Id
    name: Annotated[str, msgspec.Meta(max_length=64)]
    link: str
    weights_id: str
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=4096)]
    layout: KVLayout
    addresses: tuple[str, ...] = ()
    public_key: bytes = b""

    def with_weights(self, weights_id: str) -> InstanceInfo:
        """The same with other weights."""
        return msgspec.structs.replace(self, weights_id=weights_id)


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """The first `num_blocks` blocks of one prompt, to be had from `source` once they are computed.

    `number` is the offer's own within the instance; `prompt` names the tokens (`prompt_digest`), so that no other
    request can ever get these blocks.
    """

    source: InstanceInfo
    number: _Count
    num_blocks: _Count
    prompt: Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
    version: int = OFFER_VERSION

    @property
    def needed_version(self) -> int:
        """The version by which its layout can be told."""
        return GROUPS_VERSION if self.source.layout.groups else OFFER_VERSION

    def to_bytes(self) -> bytes:
        """What it says, for `OfferSigner` to sign. Without groups these are the bytes from before there were groups."""
        if self.source.layout.groups:
            return encode(msgspec.structs.replace(self, version=self.needed_version))
        said = msgspec.to_builtins(self, builtin_types=(bytes,))
        said["source"]["layout"].pop("groups", None)  # of one that was read it is not there
        return msgspec.msgpack.encode(said)

    @classmethod
    def from_bytes(cls, data: bytes) -> Offer:
        """Raises `PeerRefusedError` for what is no offer of this version."""
        try:
            offer: Offer = decode(data, Offer)
        except (CodecError, LayoutError) as error:
            raise PeerRefusedError(f"{len(data)} bytes are no offer: {error}") from error
        if offer.version != (needed := offer.needed_version):
            raise PeerRefusedError(f"the offer is of version {offer.version}, this is {needed}; update one side")
        if offer.source.link != "storage" and len(offer.source.addresses) != offer.source.tp_size:
            ranks = f"{len(offer.source.addresses)} addresses for {offer.source.tp_size} ranks"
            raise PeerRefusedError(f"the offer of {offer.source.name!r} has {ranks}")
        return offer


def prompt_digest(namespace: str, tokens: bytes, extras: Mapping[int, bytes] | None) -> bytes:
    """Names a prompt: SHA-256 over namespace, tokens (int32 LE) and each block's extra keys, lengths in front."""
    digest = hashlib.sha256()
    for part in (namespace.encode(), tokens):
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    for block, extra in sorted((extras or {}).items()):
        digest.update(block.to_bytes(8, "little") + len(extra).to_bytes(8, "little"))
        digest.update(extra)
    return digest.digest()


def check_fits(here: InstanceInfo, there: InstanceInfo) -> None:
    """Raise `PeerRefusedError` where blocks of one are none for the other, with what both say."""
    pairs = [
        ("weights_id", here.weights_id, there.weights_id),
        ("block_size", here.block_size, there.block_size),
        ("link", here.link, there.link),
        ("layout", _shared(here.layout), _shared(there.layout)),
    ]
    for name, mine, other in pairs:
        if mine != other:
            raise PeerRefusedError(f"instance {there.name!r} has {name} {other!r}, this one {mine!r}; they must agree")
    try:
        there.layout.heads_per_rank(there.tp_size)
    except LayoutError as error:
        ranks = f"instance {there.name!r} has {there.tp_size} ranks, this one {here.tp_size}"
        raise PeerRefusedError(f"{ranks}: {error}") from error
    large, small = max(here.tp_size, there.tp_size), min(here.tp_size, there.tp_size)
    if large != small and here.layout.groups:
        rows = ", ".join(repr(str(row)) for row in rows_of(here.layout.groups, here.block_size)[1:])
        raise PeerRefusedError(
            f"instance {there.name!r} has {there.tp_size} ranks, this one {here.tp_size}; the rows {rows} need equal "
            "numbers"
        )
    if large % small or (here.link == "storage" and large != small):
        rule = "must be equal through storage" if here.link == "storage" else "must divide one another"
        raise PeerRefusedError(
            f"instance {there.name!r} has {there.tp_size} ranks, this one {here.tp_size}; the numbers {rule}"
        )


def _shared(layout: KVLayout) -> KVLayout:
    """The layout without how each side keeps its own arrays."""
    return dataclasses.replace(layout, device_order="layer_first", extra_layer_block_ratio=1.0)
