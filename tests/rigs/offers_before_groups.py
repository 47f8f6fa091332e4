"""How an instance from before there were groups read an offer: its layout, and the versions that it knew."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

VERSION = 1


@dataclass(frozen=True, kw_only=True)
class LayoutBefore:
    """The fields of the layout then."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str = "float16"
    value_head_dim: int | None = None
    scale_dtype: str | None = None
    scale_elements: int | None = None
    heads_first: bool = False
    num_extra_layers: int = 0
    extra_layer_block_ratio: float = 1.0
    device_order: Literal["layer_first", "block_first"] = "layer_first"


class SourceBefore(msgspec.Struct, frozen=True, kw_only=True):
    """Who has the blocks."""

    instance_id: bytes
    name: str
    link: str
    weights_id: str
    block_size: int
    tp_size: int
    layout: LayoutBefore
    addresses: tuple[str, ...] = ()
    public_key: bytes = b""


class OfferBefore(msgspec.Struct, frozen=True, kw_only=True):
    """The whole offer."""

    source: SourceBefore
    number: int
    num_blocks: int
    prompt: bytes
    version: int = VERSION


def read_before(data: bytes) -> OfferBefore:
    """What was read then. Raises `ValueError` with the words of then for an offer of another version."""
    offer = msgspec.msgpack.decode(data, type=OfferBefore)
    if offer.version != VERSION:
        raise ValueError(f"the offer is of version {offer.version}, this is {VERSION}; update one side")
    return offer
