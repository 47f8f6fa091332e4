"""Token ids as packed little-endian int32.

Plain integers in a list or an array, the common case, are packed in one go: by `_native.c` where that was built, else
in Python.
Whatever else there is to take or to refuse is found out in one place, slowly, by NumPy's rules.
"""

from __future__ import annotations

import struct
import sys
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np

from fastdeploy_cache.errors import RequestError

TokenIds = Sequence[int] | np.ndarray[Any, Any]
Packer = Callable[[object], bytes | None]
_MAX_TOKEN_ID = 2**31 - 1
_FEW = 16  # up to where the plain way is the faster one
_INT32 = np.dtype(np.int32)
_PIECE = 2048  # tokens; what is looked at twice is still in the nearest cache
_ORDER = "" if sys.byteorder == "little" else "<"  # the machine's own order is the faster one


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """Tokens that `pack` has packed before: they are taken as they are."""

    tokens: bytes


def pack_plain_in_python(token_ids: object) -> bytes | None:
    """The tokens of a list or tuple of integers, or of an array of int32, 0 to 2**31 - 1; None: it is none, or has
    something else in it.

    Subclasses of `int` may pass, but not `bool` (`struct` takes whatever has `__index__`): `pack` decides about these.
    """
    if type(token_ids) is np.ndarray and token_ids.dtype is _INT32 and token_ids.ndim == 1:
        packed = token_ids.astype("<i4", copy=False).tobytes() if _ORDER else token_ids.tobytes()
        return packed if not packed or int(token_ids.min()) >= 0 else None
    if type(token_ids) is not list and type(token_ids) is not tuple:
        return None
    num_tokens = len(token_ids)
    if num_tokens == 1:
        token_id = token_ids[0]
        is_one = type(token_id) is int and 0 <= token_id <= _MAX_TOKEN_ID
        return token_id.to_bytes(4, "little") if is_one else None
    try:
        if num_tokens <= _FEW:
            if set(map(type, token_ids)) != {int}:
                return None
            packed = struct.Struct(f"{_ORDER}{num_tokens}i").pack(*token_ids)
        else:
            pieces = []
            for start in range(0, num_tokens, _PIECE):
                piece = msgspec.convert(token_ids[start : start + _PIECE], tuple[int, ...])
                pieces.append(struct.Struct(f"{_ORDER}{len(piece)}i").pack(*piece))
            packed = b"".join(pieces)
    except (struct.error, msgspec.ValidationError):
        return None
    return packed if packed[3::4].isascii() else None  # no highest bit is set


try:
    from fastdeploy_cache._native import pack_plain as _native
except ImportError:  # there was no compiler where this was installed
    _native = pack_plain_in_python
pack_plain: Final[Packer] = _native  # the faster one
IS_NATIVE: Final = pack_plain is not pack_plain_in_python


def pack(request_id: str, token_ids: TokenIds | PackedTokens, packer: Packer = pack_plain) -> bytes:
    """The tokens of a flat list, tuple, array or the like of integers, 0 to 2**31 - 1.

    Raises:
        RequestError: it is none; the token that cannot be is named, and the request.
    """
    found = packer(token_ids)
    if found is not None:
        return found
    if type(token_ids) is PackedTokens:
        return token_ids.tokens
    values = _as_array(request_id, token_ids)
    if not values.size:
        return b""
    if int(values.min()) >= 0 and int(values.max()) <= _MAX_TOKEN_ID:
        return values.astype("<i4", copy=False).tobytes()
    low, high = int(values.min()), int(values.max())
    token_id = low if low < 0 else high
    raise RequestError(f"request {request_id!r} has token id {token_id}; ids are 0 to {_MAX_TOKEN_ID}")


def _as_array(request_id: str, token_ids: Any) -> np.ndarray[Any, Any]:
    if type(token_ids) is np.ndarray and token_ids.ndim == 1 and token_ids.dtype == np.int32:
        return token_ids
    if isinstance(token_ids, array) and token_ids.typecode not in "fdu":
        values = np.frombuffer(token_ids, dtype=token_ids.typecode) if token_ids else np.empty(0, np.int32)
    else:
        try:
            values = np.asarray(token_ids)
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"tokens of request {request_id!r} are no flat list of integers: {error}") from error
    if values.ndim != 1:
        raise RequestError(f"tokens of request {request_id!r} have shape {values.shape}; give a flat list of integers")
    if values.size and values.dtype.kind not in "iu":
        for token_id in token_ids:  # integers beyond 64 bits make NumPy choose another type: name them
            if type(token_id) is int and not 0 <= token_id <= _MAX_TOKEN_ID:
                raise RequestError(f"request {request_id!r} has token id {token_id}; ids are 0 to {_MAX_TOKEN_ID}")
        raise RequestError(f"tokens of request {request_id!r} are of type {values.dtype}; give integers")
    return values
