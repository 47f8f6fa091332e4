"""Typed messages as msgpack: the only way objects cross a process border here (pickle would run what it reads)."""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from fastdeploy_cache.errors import CodecError

M = TypeVar("M")


def encode(message: msgspec.Struct) -> bytes:
    """The message as msgpack bytes; unions are told apart by the struct's tag."""
    return msgspec.msgpack.encode(message)


def decode(data: bytes, message_type: type[M] | Any) -> M:
    """The message in `data`, checked field by field against `message_type` (a Struct or a union of tagged ones).

    Raises:
        CodecError: not msgpack, or a field is missing or of another type; the message names it.
    """
    try:
        message: M = msgspec.msgpack.decode(data, type=message_type)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is one of the first
        raise CodecError(f"{len(data)} bytes are no {message_type}: {error}") from error
    return message
