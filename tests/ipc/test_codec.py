"""Typed messages: what goes in comes out, what is no such message is refused by name."""

from __future__ import annotations

import msgspec
import pytest

from fastdeploy_cache.errors import CodecError, IPCError
from fastdeploy_cache.ipc.codec import decode, encode


class Move(msgspec.Struct, frozen=True, tag="move"):
    """A message with every kind of field that ours have."""

    number: int
    name: str
    ids: bytes
    seconds: float
    error: str | None


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """A message without fields."""


MOVE = Move(2**40, "käse", bytes(range(256)), 0.25, None)


@pytest.mark.parametrize("message", [MOVE, Halt(), Move(0, "", b"", -1.5, "why")])
def test_round_trip(message: Move | Halt) -> None:
    """Every field comes back equal, and the tag tells the members of a union apart."""
    assert decode(encode(message), Move | Halt) == message


@pytest.mark.parametrize(
    ("data", "named"),
    [
        ({"type": "move", "number": "7", "name": "", "ids": b"", "seconds": 0.0, "error": None}, "number"),
        ({"type": "move", "number": 7, "name": "", "ids": 3, "seconds": 0.0, "error": None}, "ids"),
        ({"type": "move", "number": 7, "name": "", "ids": b"", "error": None}, "seconds"),
        ({"type": "jump"}, "jump"),
    ],
)
def test_a_wrong_field_is_named(data: object, named: str) -> None:
    """A field of another type, a missing one and an unknown tag raise, naming it."""
    with pytest.raises(CodecError, match=named):
        decode(msgspec.msgpack.encode(data), Move | Halt)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\xff" * 40, encode(MOVE)[:-1], encode(MOVE) + b"\x00", b"\x80"])
def test_garbage_is_refused(data: bytes) -> None:
    """Empty, random, cut and lengthened bytes are CodecErrors, which are IPCErrors."""
    with pytest.raises(CodecError, match=f"{len(data)} bytes") as refusal:
        decode(data, Move | Halt)
    assert isinstance(refusal.value, IPCError)
