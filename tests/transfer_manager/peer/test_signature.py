"""Who may make offers: those who know the group's secret, and nobody else."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.peer.offer import InstanceInfo, Offer
from fastdeploy_cache.transfer_manager.peer.signature import OfferSigner, load_secret, make_secret
from tests.rigs.offers import INFO, OFFER

SIGNER = OfferSigner(b"s" * 32)
OTHER_VALUES: dict[str, Any] = {
    "source.instance_id": bytes(16),
    "source.name": "stranger",
    "source.link": "nixl",
    "source.weights_id": "w2",
    "source.block_size": 32,
    "source.tp_size": 4,
    "source.layout": KVLayout(num_layers=3, num_kv_heads=12, head_dim=16),
    "source.addresses": ("ipc:///run/a", "ipc:///tmp/stranger"),
    "source.public_key": b"k" * 40,
    "number": 4,
    "num_blocks": 8,
    "prompt": b"p" * 32,
    "version": 7,
}


def test_what_was_signed_is_opened() -> None:
    """Whatever kind of bytes it comes as, it says what it said, and none of the secret."""
    data = SIGNER.sign(OFFER)
    assert [SIGNER.open(kind(data)) for kind in (bytes, bytearray, memoryview)] == [OFFER] * 3
    assert b"s" * 4 not in data


def test_every_field_has_another_value() -> None:
    """The list of the next test leaves none out."""
    fields = [f"source.{name}" for name in InstanceInfo.__struct_fields__]
    fields += [name for name in Offer.__struct_fields__ if name != "source"]
    assert set(OTHER_VALUES) == set(fields)


@pytest.mark.parametrize("name", OTHER_VALUES)
@pytest.mark.parametrize("signer", [None, OfferSigner(), OfferSigner(b"t" * 32)])
def test_a_field_that_was_changed_is_refused(name: str, signer: OfferSigner | None) -> None:
    """With the digest of the true offer, or one that somebody made without the secret."""
    table, _, field = name.rpartition(".")
    value = OTHER_VALUES[name]
    if table:
        value, field = msgspec.structs.replace(INFO, **{field: value}), "source"
    changed = msgspec.structs.replace(OFFER, **{field: value})
    assert changed != OFFER
    digest = SIGNER.sign(OFFER)[:32] if signer is None else signer.sign(changed)[:32]
    with pytest.raises(PeerRefusedError, match=r"no offer of this group.*peer\.secret_file"):
        SIGNER.open(digest + changed.to_bytes())


@given(st.integers(0), st.integers(1, 255))
def test_a_byte_that_was_changed_is_refused(where: int, change: int) -> None:
    """Of the digest, or of what it is over."""
    data = bytearray(SIGNER.sign(OFFER))
    data[where % len(data)] ^= change
    with pytest.raises(PeerRefusedError, match="no offer of this group"):
        SIGNER.open(bytes(data))


@given(st.integers(0))
def test_a_piece_is_refused(end: int) -> None:
    """Cut anywhere, or with more behind it."""
    data = SIGNER.sign(OFFER)
    for piece in (data[: end % len(data)], data + b"\0"):
        with pytest.raises(PeerRefusedError, match="no offer of this group"):
            SIGNER.open(piece)


@pytest.mark.parametrize(("here", "there"), [(b"", b"t" * 32), (b"s" * 32, b""), (b"s" * 32, b"t" * 32)])
def test_instances_of_two_groups_refuse_each_other(here: bytes, there: bytes) -> None:
    """Also where one of them has no secret."""
    with pytest.raises(PeerRefusedError, match="no offer of this group"):
        OfferSigner(here).open(OfferSigner(there).sign(OFFER))


def test_a_secret_is_its_owners_alone(tmp_path: Path) -> None:
    """Whatever the umask is; two are never the same, and one is not made over another."""
    before = os.umask(0)
    try:
        for name in ("a", "b"):
            make_secret(tmp_path / name)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o600
    assert len(load_secret(tmp_path / "a")) >= 32
    assert load_secret(tmp_path / "a") != load_secret(tmp_path / "b")
    kept = load_secret(tmp_path / "a")
    with pytest.raises(PeerRefusedError, match="name a new file"):
        make_secret(tmp_path / "a")
    assert load_secret(tmp_path / "a") == kept


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o622, 0o666])
def test_a_secret_that_others_know_is_refused(tmp_path: Path, mode: int) -> None:
    """Where others may read it, or write their own."""
    make_secret(tmp_path / "secret")
    (tmp_path / "secret").chmod(mode)
    with pytest.raises(PeerRefusedError, match=rf"with mode {mode:o}.*mode 600"):
        load_secret(tmp_path / "secret")


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "holds 0 bytes"), (b"guess\n", "holds 5 bytes"), (None, "No such")]
)
def test_a_file_without_a_secret_is_refused(tmp_path: Path, content: bytes | None, words: str) -> None:
    """Empty, too short, or not there: the message says how one is made."""
    path = tmp_path / "secret"
    if content is not None:
        path.touch(mode=0o600)
        path.write_bytes(content)
    with pytest.raises(PeerRefusedError, match=rf"{words}.*fastdeploy-cache peer-secret"):
        load_secret(path)
