"""What blocks are called: our own hashes, and those of vLLM by known answers."""

from __future__ import annotations

import builtins
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache import Request
from fastdeploy_cache.books.block_hash import BlockHasher, root_hash
from fastdeploy_cache.books.image_keys import images_in
from fastdeploy_cache.errors import ConfigError, RequestError
from fastdeploy_cache.events.names import NameScheme, name_blocks

# vLLM 0.32.0: `hash_block_tokens` with `sha256_cbor`, blocks of four tokens, its default seed
_PLAIN = (
    "78fea00db07307bd16f72f90a0883907022dd80dacadfa2352bd042bc30c2b69",
    "457be67424fd6cd4ccc5a220236e8298054a6fcb2474aa32463fe9ee3ffe0556",
    "828134254ddaaaca32ac611408e7abdc6b269ed3e67d2fe602ea81817b39a35a",
)
_SALTED = (
    "a8551d82bcdba753fb76d3786abac7614ac45f3c55549751aed7bb99b7efc16f",
    "133b75271d839449a339ccaed239b737bea9f30b35e4002da8e323c247c51750",
    "8553179e6395b3d5f7b98c4d7659fc91b6946fbb5407da9be0d245cd13f2dcee",
)
_IMAGES = (  # images over blocks 0 to 2, see below
    "32e959a747ca7a2a79f93b5a4907f5642702390b9b06c9d71b2c53e3e7908a51",
    "9bcf9923065365736f972c0a9268670ce50ebe5c4bfbf0876c6d0701a10d9bb7",
    "0df362490b9c4a0e63d1399883b144f7cc0e8b580ac03d21b4fc30d6ecb83101",
    "1e224ce04928c9a75969cfdf7678401e2d35d082993042de6161e367a488a01d",
)
_PLAIN_TOKENS = [70_000 * (block + 1) + place for block in range(3) for place in range(4)]


def names(kind: Any, tokens: list[int], namespace: str = "", **scheme: Any) -> list[Any]:
    chosen = NameScheme(kind=kind, block_size=4, **scheme)
    return [*name_blocks(chosen, chosen.names(), tokens, namespace)]


def test_names_of_vllm() -> None:
    """With and without a salt, as vLLM hashes them; a token behind the last full block counts for nothing."""
    assert names("sha256_cbor", [*_PLAIN_TOKENS, 5]) == [bytes.fromhex(each) for each in _PLAIN]
    assert names("sha256_cbor", list(range(12)), "tenant") == [bytes.fromhex(each) for each in _SALTED]


@pytest.mark.parametrize("kind", ["own", "sha256_cbor"])
def test_a_prompt_without_a_full_block_has_no_names(kind: Any) -> None:
    """Nor has one without tokens."""
    assert names(kind, [1, 2, 3]) == names(kind, []) == []


def test_names_of_vllm_as_numbers() -> None:
    """The last 64 bits, as `maybe_convert_block_hash` gives them."""
    assert names("sha256_cbor", _PLAIN_TOKENS, form="int64")[2] == 210122725744288602


def test_another_seed_gives_other_names() -> None:
    """As PYTHONHASHSEED does there."""
    assert not {*names("sha256_cbor", _PLAIN_TOKENS, seed="7")} & {*names("sha256_cbor", _PLAIN_TOKENS)}


def test_own_names_are_those_of_storage() -> None:
    """The same digests by which blocks are found in a store."""
    tokens = np.arange(12, dtype=np.int32)
    expected = BlockHasher(4).extend(root_hash("tenant", 4), tokens.tobytes(), 0, 3)
    assert b"".join(names("own", tokens.tolist(), "tenant")) == expected


@pytest.mark.parametrize("kind", ["own", "sha256_cbor"])
def test_images_and_namespaces_part_names(kind: Any) -> None:
    """A block with an image, or of another namespace, is called otherwise, and so is all behind it."""
    scheme = NameScheme(kind=kind, block_size=4)
    naming = scheme.names()
    plain, image, other, salted = (
        name_blocks(scheme, naming, list(range(12)), namespace, images)
        for namespace, images in (("", ()), ("", [(5, 2, b"cat")]), ("", [(5, 2, "dog")]), ("a", ()))
    )
    assert plain[0] == image[0] == other[0] != salted[0]
    assert len({plain[1], image[1], other[1], salted[1]}) == len({plain[2], image[2], other[2], salted[2]}) == 4


def test_images_have_vllms_names() -> None:
    """An image over three blocks, from the middle of the first on, and one that begins where it ends; with a salt."""
    scheme = NameScheme(kind="sha256_cbor", block_size=4)
    images: list[tuple[int, int, bytes | str]] = [(2, 7, "a" * 8), (9, 2, b"b" * 8)]
    found = name_blocks(scheme, scheme.names(), list(range(16)), "tenant", images)
    assert found == [bytes.fromhex(each) for each in _IMAGES]


@pytest.mark.parametrize("name", ["identifier", b"\xff\x00", b""])
def test_keys_of_images_can_be_read(name: bytes | str) -> None:
    """What a request puts into its blocks' keys; and a key of another form has none."""
    request = Request(request_id="a", prompt_token_ids=list(range(20)), images=[(3, 6, name), (9, 1, "next")])
    keys = request.extra_keys(4)
    packed = name.encode() if isinstance(name, str) else name
    assert keys is not None and [[*map(tuple, images_in(keys[block]))] for block in sorted(keys)] == [
        [(3, 6, packed)], [(3, 6, packed)], [(3, 6, packed), (9, 1, b"next")],
    ]  # fmt: skip
    assert images_in(b"cat") == images_in(keys[0][:-1] if name else keys[0] + b"x") == []


@pytest.mark.parametrize("image", [(-1, 2, "a"), (0, 2, "\ud800"), (0, 2), (0, "x", b"a")])
def test_what_is_no_image_is_refused(image: Any) -> None:
    """As `RequestError`, which is what a mirror's callers expect."""
    scheme = NameScheme(block_size=4)
    with pytest.raises(RequestError, match=r"give .offset, length, hash. of each"):
        name_blocks(scheme, scheme.names(), list(range(12)), "", [image])


def test_what_is_no_prompt_is_refused() -> None:
    """By the same rules as a request's tokens."""
    with pytest.raises(RequestError, match="token id -1"):
        names("own", [1, 2, -1, 4])


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what to install, and what else to do."""
    real = builtins.__import__

    def without(name: str, *rest: Any, **more: Any) -> Any:
        if name == "cbor2":
            raise ImportError(name)
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigError, match=r"cbor2; install fastdeploy-cache\[vllm-names\], or use 'own'"):
        NameScheme(kind="sha256_cbor").names()
