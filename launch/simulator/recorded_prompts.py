"""Prompts made up from the marks of a flight recording: equal blocks have equal tokens, and no others have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from fastdeploy_cache.insight.flight_file import FlightRecording
from fastdeploy_cache.insight.flight_records import RecordKind
from fastdeploy_cache.launch.simulator.trace import Int32Array

Blocks = np.ndarray[Any, np.dtype[np.int32]]
_NONE: Blocks = np.empty(0, np.int32)


class RecordedPrompts:
    """The blocks of each request that a recording tells of, by number: as many as are known when it ends."""

    def __init__(self, recording: FlightRecording, block_size: int) -> None:
        """Raises `RecordingError` for a recording that cannot be."""
        self._block_size = block_size
        self._numbers: dict[int, int] = {}  # of marks
        self.num_blocks = 0  # that differ
        self._blocks: dict[int, Blocks] = {}
        prompts = (RecordKind.MATCHED, RecordKind.LOOKED)
        for record in recording.of_kind(*prompts, RecordKind.RELEASED, RecordKind.MARKED):
            number = record["number"]
            if record["kind"] in prompts:
                front = self._front(record["author"], record["num_known"])
                self._blocks[number] = np.concatenate([front, self._named(record["marks"])])
            elif number in self._blocks:  # a request that came back had more than it has published now
                front, known = self._front(number, record["first"]), self._blocks[number]
                behind = known[record["first"] + record["num_marks"] :]
                self._blocks[number] = np.concatenate([front, self._named(record["marks"]), behind])

    def blocks(self, number: int, num_blocks: int) -> Blocks:
        """The first so many blocks of a request, by their numbers. What nobody knows is like nothing else."""
        self._blocks[number] = self._front(number, max(num_blocks, len(self._blocks.get(number, _NONE))))
        return self._blocks[number][:num_blocks]

    def tokens(self, number: int, start: int, end: int) -> Int32Array:
        """Its tokens [start, end)."""
        size = self._block_size
        blocks = self.blocks(number, -(-end // size))[start // size :]
        return np.repeat(blocks, size)[start % size :][: end - start]

    def _front(self, number: int, num_blocks: int) -> Blocks:
        known = self._blocks.get(number, _NONE)[:num_blocks]
        if len(known) == num_blocks:
            return known
        return np.concatenate([known, np.fromiter(self._new(num_blocks - len(known)), np.int32)])

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

    def _new(self, num_blocks: int) -> Iterator[int]:
        for _ in range(num_blocks):
            yield self.num_blocks
            self.num_blocks += 1
