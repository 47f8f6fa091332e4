"""Typed messages: what goes in comes out, what is no such message is refused by name."""

from __future__ import annotations

import re
import subprocess
import sys

import msgspec
import numpy as np
import pytest

from fastdeploy_cache.errors import CodecError, IPCError
from fastdeploy_cache.ipc.codec import Int32Array, decode, encode, pack_int32, unpack_int32
from tests.rigs.source_map import ROOT


class Move(msgspec.Struct, frozen=True, tag="move"):
    """A message with every kind of field that ours have."""

    number: int
    name: str
    ids: bytes
    seconds: float
    error: str | None


class Halt(msgspec.Struct, frozen=True, tag="halt"):
    """A message without fields."""


class Numbers(msgspec.Struct, frozen=True, tag="numbers"):
    """A message with an array."""

    values: Int32Array


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


@pytest.mark.parametrize("numbers", [[], [7], [0, -1, 2**31 - 1, -(2**31)]])
def test_arrays_come_back_equal(numbers: list[int]) -> None:
    """Any 32-bit numbers, also those of another order of bytes in memory, and read-only."""
    for dtype in ("<i4", ">i4"):
        message: Numbers = decode(encode(Numbers(np.array(numbers, dtype))), Numbers | Halt)
        assert message.values.tolist() == numbers and message.values.dtype == np.int32
        assert not message.values.flags.writeable
    assert unpack_int32(pack_int32(np.array(numbers, np.int32))).tolist() == numbers


@pytest.mark.parametrize("values", [b"\0\0\0", "abcd", 7, [1, 2], None])
def test_what_is_no_array_is_refused(values: object) -> None:
    """Bytes that end within a number, and any other type, are named as the field that they are in."""
    with pytest.raises(CodecError, match="values"):
        decode(msgspec.msgpack.encode({"type": "numbers", "values": values}), Numbers | Halt)


def test_what_goes_in_no_message_is_refused() -> None:
    """An object that is no message cannot be sent."""
    with pytest.raises(TypeError, match="object"):
        encode(Numbers(object()))  # type: ignore[arg-type]


def test_deep_nesting_is_refused() -> None:
    """Thousands of lists within each other are no message, even where nobody asks for what is in them."""
    data = b"\x82\xa4type\xa4halt\xa1x" + b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(CodecError, match=f"{len(data)} bytes"):
        decode(data, Move | Halt)


_MANY_AT_ONCE = """
import sys, threading
import msgspec
from fastdeploy_cache.ipc.codec import decode, encode

sys.setswitchinterval(1e-6)
for _ in range(200):
    Inner = msgspec.defstruct("Inner", [("x", int), ("y", list[int])])
    Outer = msgspec.defstruct("Outer", [("p", Inner), ("q", list[Inner])], tag=True)
    data, barrier, read = encode(Outer(Inner(1, [2]), [Inner(3, [])])), threading.Barrier(3), []

    def run():
        barrier.wait()
        read.append(decode(data, Outer))

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read) == 3 and read[0] == read[2] and read[0].q[0].x == 3
"""


@pytest.mark.processes
def test_threads_may_read_their_first_message_at_the_same_time() -> None:
    """msgspec takes a type apart at its first use: a thread that came by in between would end the process."""
    command = [sys.executable, "-c", _MANY_AT_ONCE]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert not said.returncode, (said.returncode, said.stderr)


READ_BY_ONE_THREAD = {  # commands
    "launch/engines/results.py", "launch/engines/vllm_plan.py", "launch/faults/story.py", "launch/simulator/trace.py",
}  # fmt: skip
_GIVES_A_TYPE = re.compile(r"msgspec\.(?:json\.decode|msgpack\.decode|convert)\((?P<rest>.*)")


def gives_its_own(line: str) -> bool:
    """Whether a line gives msgspec a type of ours that was not taken apart before."""
    found = _GIVES_A_TYPE.search(line)
    is_typed = found is not None and (", " in found["rest"])
    return is_typed and "taken_apart(" not in line and "tuple[int, ...]" not in line


def test_types_are_taken_apart_before_msgspec_reads_them() -> None:
    """By everything that may run in two threads, wherever it lies."""
    packages = ("fastdeploy_cache", "transfer_manager", "ipc", "metrics", "launch")
    paths = [path for package in packages for path in (ROOT / package).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in paths if any(map(gives_its_own, path.read_text().splitlines()))}
    assert found == READ_BY_ONE_THREAD
