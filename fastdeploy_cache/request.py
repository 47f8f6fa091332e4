"""One sequence of tokens that an engine serves."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from fastdeploy_cache.errors import RequestError

TokenIds = Sequence[int] | np.ndarray[Any, Any]
TOKEN_BYTES = 4
_MAX_TOKEN_ID = 2**31 - 1


class Request:
    """Prompt and output tokens, kept as packed little-endian int32.

    The engine owns it and appends what it samples; one thread at a time. A list of 128k tokens takes milliseconds to
    pack, an int32 array microseconds: pack once, keep the request.
    """

    def __init__(self, *, request_id: str, prompt_token_ids: TokenIds, namespace: str = "") -> None:
        """`namespace` (tenant salt, LoRA adapter): prefixes of different namespaces never meet.

        Raises:
            RequestError: an empty prompt, a token id below 0 or above 2**31 - 1, or no integers.
        """
        try:
            namespace.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"namespace {namespace!r} of request {request_id!r} is no UTF-8 text") from error
        self.request_id = request_id
        self.namespace = namespace
        self.counted = False  # set by the manager once the request is part of the hit rates
        self.tokens = bytearray(_pack(request_id, prompt_token_ids))
        self.num_prompt_tokens = len(self.tokens) // TOKEN_BYTES
        if not self.num_prompt_tokens:
            raise RequestError(f"request {request_id!r} has an empty prompt; give it at least one token")

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and output."""
        return len(self.tokens) // TOKEN_BYTES

    def append_output(self, token_ids: TokenIds) -> None:
        """Append sampled tokens; all of them or, on `RequestError`, none."""
        self.tokens += _pack(self.request_id, token_ids)


def _pack(request_id: str, token_ids: TokenIds) -> bytes:
    if isinstance(token_ids, array) and token_ids.typecode not in "fdu":
        values = np.frombuffer(token_ids, dtype=token_ids.typecode) if token_ids else np.empty(0, np.int32)
    else:
        try:
            values = np.asarray(token_ids)
        except (ValueError, TypeError, OverflowError) as error:
            raise RequestError(f"tokens of request {request_id!r} are no flat list of integers: {error}") from error
    if values.ndim != 1:
        raise RequestError(f"tokens of request {request_id!r} have shape {values.shape}; give a flat list of integers")
    if not values.size:
        return b""
    if values.dtype.kind not in "iu":
        for token_id in token_ids:  # integers beyond 64 bits make NumPy choose another type: name them
            if type(token_id) is int and not 0 <= token_id <= _MAX_TOKEN_ID:
                raise RequestError(f"request {request_id!r} has token id {token_id}; ids are 0 to {_MAX_TOKEN_ID}")
        raise RequestError(f"tokens of request {request_id!r} are of type {values.dtype}; give integers")
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > _MAX_TOKEN_ID:
        bad = low if low < 0 else high
        raise RequestError(f"request {request_id!r} has token id {bad}; ids are 0 to {_MAX_TOKEN_ID}")
    return np.ascontiguousarray(values, dtype="<i4").tobytes()
