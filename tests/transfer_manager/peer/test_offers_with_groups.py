"""Offers, keys and recordings beside groups: without them every byte is as before, with them old readers refuse."""

from __future__ import annotations

import hashlib

import msgspec
import pytest

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.insight.flight.header import header_of
from fastdeploy_cache.ipc.codec import encode
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import GROUPS_VERSION, OFFER_VERSION, Offer, check_fits
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from tests.rigs.hybrid_models import SMALL
from tests.rigs.offers import INFO, OFFER
from tests.rigs.offers_before_groups import read_before

UNIFORM = KVLayout(
    num_layers=3,
    num_kv_heads=4,
    head_dim=8,
    dtype="bfloat16",
    num_extra_layers=1,
    scale_dtype="float32",
    value_head_dim=16,
)


def offer_of(layout: KVLayout, version: int) -> Offer:
    return msgspec.structs.replace(OFFER, source=msgspec.structs.replace(INFO, layout=layout), version=version)


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def test_bytes_of_before() -> None:
    """A key, an offer and the head of a recording of a uniform model, as commit 9162f34 wrote them."""
    key = KeySpace.of("w1", UNIFORM.for_rank(2, 16), 16, 1, 2).key(bytes(range(32)))
    assert key == (
        "fdc1:60c5590f72eef292f9545afc28bf63ca:12e80363cd7a45f502e1ab0134a263fe:"
        "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    )
    offer = offer_of(UNIFORM, 1).to_bytes()
    assert digest(offer) == "e36717d8d6d651d575d035bb9dc7f2c856baff690fb3ef5b4ea90d5c1efa8c11"
    config = CacheConfig(block_size=16, num_gpu_blocks=8, num_cpu_blocks=4, layout=UNIFORM, transfer_client="inline")
    header = header_of(config, reason="asked", clock_seconds=1.5, unix_seconds=2.5, num_dropped=0)
    assert digest(msgspec.msgpack.encode(header)) == "c4c9e9374b44bb9314c2732ecec8432e7179bed2bd7d814c11c10130538a1897"


def test_an_old_instance_reads_what_it_knows_and_refuses_groups() -> None:
    """It would drop the field, and take hybrid blocks for blocks with all layers in them."""
    assert read_before(offer_of(UNIFORM, 1).to_bytes()).source.layout.num_layers == 3
    with pytest.raises(ValueError, match=r"version 2, this is 1; update one side"):
        read_before(offer_of(SMALL, GROUPS_VERSION).to_bytes())
    with pytest.raises(ValueError, match=r"version 2, this is 1; update one side"):
        read_before(offer_of(SMALL, OFFER_VERSION).to_bytes())  # as one is made: whoever signs it need not think of it


def test_offers_with_groups_come_out_as_they_went_in() -> None:
    """Groups, states and all; another model's groups do not fit."""
    offer = Offer.from_bytes(offer_of(SMALL, GROUPS_VERSION).to_bytes())
    assert offer == offer_of(SMALL, GROUPS_VERSION)
    with pytest.raises(PeerRefusedError, match="has layout"):
        check_fits(offer_of(UNIFORM, 1).source, offer.source)


@pytest.mark.parametrize(("layout", "version"), [(SMALL, 1), (UNIFORM, 2), (UNIFORM, 3)])
def test_a_version_that_its_layout_does_not_have(layout: KVLayout, version: int) -> None:
    """Refused with both numbers: nobody writes that."""
    with pytest.raises(
        PeerRefusedError, match=rf"version {version}, this is {3 - version if version < 3 else 1}; update"
    ):
        Offer.from_bytes(encode(offer_of(layout, version)))
