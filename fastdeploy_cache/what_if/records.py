"""Records of references, as `books.references` makes them, read one by one from a stream of bytes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from fastdeploy_cache.books.leaves.policy import NO_SESSION, SessionHint
from fastdeploy_cache.books.references import FORGOTTEN, HEADER

_NUM_OWN = 7  # fields of a header in front of the hint


class Reference(NamedTuple):
    """A request that was released. `marks`: four bytes for each of its blocks."""

    seconds: float
    namespace: int
    num_prompt_tokens: int
    num_asked_blocks: int
    priority: float
    keep_seconds: float
    flags: int
    marks: bytes
    hint: SessionHint = NO_SESSION

    @property
    def is_reset(self) -> bool:
        """It is none: all that was cached before is forgotten."""
        return bool(self.flags & FORGOTTEN)


class Records:
    """Cuts a stream into records, wherever its pieces end."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> Iterator[Reference]:
        """The records that are whole now."""
        rest, at = self._rest, 0
        rest += data
        while len(rest) - at >= HEADER.size:
            num_bytes, *fields = HEADER.unpack_from(rest, at)
            if len(rest) - at < num_bytes:
                break
            marks, hint = bytes(rest[at + HEADER.size : at + num_bytes]), SessionHint._make(fields[_NUM_OWN:])
            yield Reference._make([*fields[:_NUM_OWN], marks, hint])
            at += num_bytes
        del rest[:at]
