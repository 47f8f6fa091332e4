"""Prompts made up from the marks of a flight recording: equal blocks have equal tokens, and no others have."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np

from fastdeploy_cache.errors import RecordingError
from fastdeploy_cache.insight.flight.file import FlightRecording
from fastdeploy_cache.insight.flight.records import Record, RecordKind
from fastdeploy_cache.launch.simulator.trace import Int32Array

MAX_TOKENS: Final = 2**24  # of a request: 64 MiB
_MAX_UNKNOWN_BLOCKS: Final = 2**20  # beside one for each byte of the file
_MAX_COPIED_BLOCKS: Final = 2**26  # 256 MiB
Blocks = np.ndarray[Any, np.dtype[np.int32]]


class _Known(NamedTuple):
    """Blocks of a request: `start` that another one has, too, and its `own` behind them. What is shared is kept once,
    however often it is referred to."""

    front: _Known | None
    start: int
    own: Blocks

    @property
    def end(self) -> int:
        return self.start + len(self.own)


_NOTHING: Final = _Known(None, 0, np.empty(0, np.int32))


class RecordedPrompts:
    """The blocks of each request that a recording tells of, by number: as many as are known when it ends.

    What is kept is bounded by the size of the file: its marks, and what it speaks of without a mark.
    """

    def __init__(self, recording: FlightRecording, block_size: int) -> None:
        """Raises `RecordingError` for a recording that cannot be."""
        self._block_size = block_size
        self._numbers: dict[int, int] = {}  # of marks
        self.num_blocks = 0  # that differ
        self._known: dict[int, _Known] = {}
        self._num_unknown_left = _MAX_UNKNOWN_BLOCKS + recording.num_bytes
        self._num_copies_left = _MAX_COPIED_BLOCKS
        prompts = (RecordKind.MATCHED, RecordKind.LOOKED)
        for record in recording.of_kind(*prompts, RecordKind.RELEASED, RecordKind.MARKED):
            number = record["number"]
            if record["kind"] in prompts:
                self._check_size(record)
                self._known[number] = self._behind(record["author"], record["num_known"], record["marks"])
            elif number in self._known and (record["num_marks"] or record["first"] > self._known[number].end):
                self._publish(number, record["first"], record["marks"])

    def _check_size(self, record: Record) -> None:
        num_tokens, num_blocks = record["num_tokens"], record["num_known"] + record["num_marks"]
        if num_tokens // self._block_size != num_blocks:
            raise _damaged(record["number"], f"has {num_tokens} tokens, and {num_blocks} blocks")
        if record["num_found"] > num_blocks:
            raise _damaged(record["number"], f"has {num_blocks} blocks, and {record['num_found']} were found")
        self._check_length(record["number"], num_tokens)

    @staticmethod
    def _check_length(number: int, num_tokens: int) -> None:
        if num_tokens > MAX_TOKENS:
            raise _damaged(number, f"has {num_tokens} tokens, more than the {MAX_TOKENS} that are replayed")

    def _publish(self, number: int, first: int, marks: np.ndarray[Any, np.dtype[np.uint32]]) -> None:
        """What a request has published behind its prompt. One that came back had more than it has published now."""
        before = self._known[number]
        after = self._behind(number, first, marks)
        if after.end < before.end:
            self._num_copies_left -= before.end - after.end
            if self._num_copies_left < 0:
                raise _damaged(number, f"and others have more than {_MAX_COPIED_BLOCKS} blocks in two ways")
            after = after._replace(own=np.concatenate([after.own, _read(before, after.end, before.end)]))
        self._known[number] = after

    def _behind(self, number: int, num_blocks: int, marks: np.ndarray[Any, np.dtype[np.uint32]]) -> _Known:
        """The first so many blocks of a request, and those of these marks."""
        own = self._named(marks)
        front: _Known | None = self._up_to(number, num_blocks)
        while front is not None and num_blocks <= front.start:  # what has no part in it is not kept
            front = front.front
        return _Known(front if num_blocks else None, num_blocks, own)

    def blocks(self, number: int, num_blocks: int, first: int = 0) -> Blocks:
        """The blocks [first, num_blocks) of a request, by their numbers. What nobody knows is like nothing else."""
        known = self._known[number] = self._up_to(number, num_blocks)
        return _read(known, first, num_blocks)

    def tokens(self, number: int, start: int, end: int) -> Int32Array:
        """Its tokens [start, end). Raises `RecordingError` where these are more than a recording can tell of."""
        self._check_length(number, end)
        size = self._block_size
        blocks = self.blocks(number, -(-end // size), start // size)
        return np.repeat(blocks, size)[start % size :][: end - start]

    def _up_to(self, number: int, num_blocks: int) -> _Known:
        """What is known of a request, made up where that is less than so many blocks."""
        known = self._known.get(number, _NOTHING)
        num_unknown = num_blocks - known.end
        if num_unknown <= 0:
            return known
        self._num_unknown_left -= num_unknown
        if self._num_unknown_left < 0:
            raise _damaged(number, f"has {num_blocks} blocks, and nothing in the file tells of them")
        made_up = np.arange(self.num_blocks, self.num_blocks + num_unknown, dtype=np.int32)
        self.num_blocks += num_unknown
        return _Known(known if known.end else None, known.end, made_up)

    def _named(self, marks: np.ndarray[Any, np.dtype[np.uint32]]) -> Blocks:
        numbers = self._numbers
        named = np.empty(len(marks), np.int32)
        for place, mark in enumerate(marks.tolist()):
            number = numbers.get(mark)
            if number is None:
                number = numbers[mark] = self.num_blocks
                self.num_blocks += 1
            named[place] = number
        return named


def _read(known: _Known, first: int, end: int) -> Blocks:
    """The blocks [first, end)."""
    found, part = np.empty(max(0, end - first), np.int32), known
    while end > first:
        if end > part.start:
            start = max(first, part.start)
            found[start - first : end - first] = part.own[start - part.start : end - part.start]
            end = start
        if part.front is None:
            break
        part = part.front
    return found


def _damaged(number: int, text: str) -> RecordingError:
    return RecordingError(f"the recording is damaged: request {number} {text}")
