"""Typed messages as msgpack: the only way objects cross a process border here (pickle would run what it reads).

Messages are msgspec structs, and dataclasses within them. An array of 32-bit integers goes as its packed bytes,
little-endian.
"""

from __future__ import annotations

import functools
import threading
from typing import Any, Final, TypeVar

import msgspec
import numpy as np

from fastdeploy_cache.errors import CodecError

M = TypeVar("M")
_TAKING_APART: Final = threading.Lock()
Int32Array = np.ndarray[Any, np.dtype[np.int32]]


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack bytes; unions are told apart by the struct's tag."""
    return msgspec.msgpack.encode(message, enc_hook=_to_wire)


def decode(data: bytes, message_type: type[M] | Any) -> M:
    """The message in `data`, checked field by field against `message_type` (a Struct or a union of tagged ones).

    Raises:
        CodecError: not msgpack, or a field is missing or of another type; the message names it.
    """
    wanted: Any = message_type
    try:
        message: M = _decoder(wanted).decode(data)
    # Texts that are no UTF-8, and nesting that is deeper than the interpreter's stack, are no errors of msgspec's own.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CodecError(f"{len(data)} bytes are no {message_type}: {error}") from error
    return message


def taken_apart(wanted: Any) -> Any:
    """The type itself, which any thread may give to msgspec from now on.

    At the first use msgspec notes a struct's or dataclass's fields at the class, and fills in their types behind that.
    A second thread that comes by in between reads through what is not there yet, and the process dies of SIGSEGV, as
    two lanes of a rank did that read their first tasks at the same time. (Seen with msgspec 0.22.)
    """
    _decoder(wanted)
    return wanted


@functools.cache
def _decoder(message_type: Any) -> msgspec.msgpack.Decoder[Any]:
    """What reads a type. Taking the type apart costs several times as much as reading a message. Any thread."""
    with _TAKING_APART:  # the cache alone lets two threads in
        return msgspec.msgpack.Decoder(message_type, dec_hook=_from_wire)


def pack_int32(numbers: Int32Array) -> bytes:
    """The numbers as they go on the wire."""
    return np.asarray(numbers, dtype="<i4").tobytes()


def unpack_int32(data: bytes) -> Int32Array:
    """The numbers in `data`, read-only. Raises `ValueError` where the last one is cut."""
    return np.frombuffer(data, dtype="<i4")


def _to_wire(value: object) -> bytes:
    if isinstance(value, np.ndarray):
        return pack_int32(value)
    raise TypeError(f"{type(value)} goes in no message")


def _from_wire(wanted: object, value: object) -> Int32Array:
    if wanted != Int32Array or not isinstance(value, bytes):
        raise TypeError(f"{type(value).__name__} in the place of {wanted}")
    return unpack_int32(value)
