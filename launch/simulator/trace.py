"""Request traces: one JSON object per line, gzip-compressed or not.

Fields, as in Mooncake's published traces: `timestamp` (milliseconds), `input_length` (tokens), `hash_ids` (an integer
for each block of the prompt, naming it together with all before it). `session_id` and `output_length` are hints, and
may be missing. Others are ignored.
"""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from fastdeploy_cache.books.leaves.policy import SessionHint
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import LaunchError, reason_of
from fastdeploy_cache.request import session_number

Int32Array = np.ndarray[Any, np.dtype[np.int32]]


class TraceError(LaunchError):
    """A trace cannot be read; the message has the line and the reason."""


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    hash_ids: list[int]
    session_id: Any = None
    output_length: Any = 0


@dataclass(frozen=True)
class TraceRequest:
    """`blocks` names the full blocks of a prompt of `num_tokens`; equal numbers, equal prefixes up to there. `hint`:
    what is known of its session, and of its answer."""

    seconds: float
    num_tokens: int
    blocks: Int32Array
    hint: SessionHint | None = None


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival, cut into blocks of `block_size` tokens numbered from 0."""

    requests: list[TraceRequest]
    block_size: int
    num_distinct_blocks: int
    num_distinct_ids: int  # block numbers lie below
    num_skipped_lines: int
    num_unnamed_tokens: int  # tokens of prompts for which no hash id stands, beyond a last partial block each
    hybrid: CacheConfig | None = None  # of a recording alone: the settings of a cache whose model was a hybrid one

    @property
    def num_tokens(self) -> int:
        """Prompt tokens of all requests."""
        return sum(request.num_tokens for request in self.requests)


def read_trace(path: Path, trace_block_size: int, block_size: int, skip_bad: bool = False) -> Trace:
    """Read a trace whose ids stand for `trace_block_size` tokens each, cut into blocks of `block_size`.

    Raises:
        TraceError: an unreadable file, a bad line (unless `skip_bad`), no requests, a block size that does not divide.
    """
    if block_size < 1 or trace_block_size % block_size:
        raise TraceError(f"--block-size {block_size} does not divide --trace-block-size {trace_block_size}")
    requests: list[TraceRequest] = []
    numbers: dict[int, int] = {}
    num_skipped, num_unnamed, latest = 0, 0, -math.inf
    for number, text in _lines(path):
        try:
            line = _parse(text, latest, trace_block_size)
        except ValueError as error:
            if not skip_bad:
                raise TraceError(f"{path}, line {number}: {error}; --skip-bad leaves such lines out") from None
            num_skipped += 1
            continue
        latest = line.timestamp
        unnamed = line.input_length - len(line.hash_ids) * trace_block_size
        num_unnamed += unnamed if unnamed >= trace_block_size else 0
        ids = np.array([numbers.setdefault(i, len(numbers)) for i in line.hash_ids], dtype=np.int64)
        blocks = _cut(ids, trace_block_size // block_size, line.input_length // block_size)
        requests.append(TraceRequest(line.timestamp / 1000, line.input_length, blocks, _hint_of(line)))
    if not requests:
        raise TraceError(f"{path} has no requests ({num_skipped} bad lines)")
    if len(numbers) * (trace_block_size // block_size) >= 2**31:
        raise TraceError(
            f"{path} has {len(numbers)} distinct ids: too many for --block-size {block_size}; use a larger"
        )
    num_ids = len(numbers) * (trace_block_size // block_size)
    seen = np.zeros(num_ids, bool)
    for request in requests:
        seen[request.blocks] = True
    return Trace(requests, block_size, int(seen.sum()), num_ids, num_skipped, num_unnamed)


def _hint_of(line: _Line) -> SessionHint:
    session, length = line.session_id, line.output_length  # hints: what is none says nothing
    is_length = isinstance(length, int | float) and 0 <= length < 2**32
    number = session_number("", str(session)) if isinstance(session, int | str) else 0
    return SessionHint(session=number, going=0, tool=0, num_answer_tokens=int(length) if is_length else 0)


def _cut(ids: np.ndarray[Any, np.dtype[np.int64]], parts: int, num_full: int) -> Int32Array:
    """Each id stands for `parts` blocks in a row; only full blocks are kept."""
    blocks = (ids[:, None] * parts + np.arange(parts)).ravel()[:num_full]
    return blocks.astype(np.int32)


def _parse(text: bytes, latest: float, trace_block_size: int) -> _Line:
    try:
        line = msgspec.json.decode(text, type=_Line)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise ValueError(str(error)) from None
    if line.timestamp < latest:
        raise ValueError(f"timestamp {line.timestamp:g} lies before {latest:g}, that of an earlier line")
    if line.input_length < 1:
        raise ValueError(f"input_length is {line.input_length}; a prompt has at least 1 token")
    if len(line.hash_ids) > -(-line.input_length // trace_block_size):
        raise ValueError(
            f"{len(line.hash_ids)} hash_ids of {trace_block_size} tokens for {line.input_length} tokens; check "
            "--trace-block-size"
        )
    return line


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbered lines that are not blank."""
    try:
        with path.open("rb") as raw:
            compressed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            with gzip.open(raw) if compressed else raw as lines:
                yield from ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"cannot read trace {path}: {reason_of(error)}") from error
