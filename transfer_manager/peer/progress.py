"""How far the reading of one rank's blocks is, layer by layer. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fastdeploy_cache.transfer_manager.peer.messages import Chunk


class ReadStep(NamedTuple):
    """Blocks [first, end) of the offer in layers [first_layer, end_layer)."""

    first: int
    end: int
    first_layer: int
    end_layer: int


class _Span:
    """Blocks [first, end), of which the first `num_read` of `num_ready` layers have been read."""

    __slots__ = ("end", "first", "num_read", "num_ready")

    def __init__(self, first: int, end: int, num_read: int, num_ready: int) -> None:
        self.first, self.end, self.num_read, self.num_ready = first, end, num_read, num_ready


class Progress:
    """Blocks [first_block, num_blocks) of an offer::

    block     first_block ........................ num_blocks
    spans     [ all layers read ][ 12 of 40 ready ][ unknown
    """

    def __init__(self, first_block: int, num_blocks: int, num_layers: int) -> None:
        self._num_blocks, self._num_layers = num_blocks, num_layers
        self._known_end = first_block
        self._spans: list[_Span] = []  # that are not read whole, in order

    @property
    def is_done(self) -> bool:
        """Everything has been read."""
        return self._known_end == self._num_blocks and not self._spans

    @property
    def num_layers_in_flight(self) -> int:
        """Layers that are ready and not read, of spans of blocks."""
        return sum(span.num_ready - span.num_read for span in self._spans)

    def note(self, num_complete: int, chunks: Sequence[Chunk]) -> None:
        """The owner's word: so many blocks are complete, and so far are the chunks behind. What is older than what is
        known changes nothing."""
        for edge in (num_complete, *(chunk.end for chunk in chunks)):
            end = min(edge, self._num_blocks)
            if end > self._known_end:
                self._spans.append(_Span(self._known_end, end, 0, 0))
                self._known_end = end
        self._cut(num_complete)
        for span in self._spans:
            if span.end <= num_complete:
                span.num_ready = self._num_layers
            else:
                layers = [chunk.num_layers for chunk in chunks if chunk.end > span.first][:1]
                span.num_ready = max(span.num_ready, *(min(n, self._num_layers) for n in layers), 0)

    def _cut(self, block: int) -> None:
        for index, span in enumerate(self._spans):
            if span.first < block < span.end:
                self._spans[index : index + 1] = [
                    _Span(span.first, block, span.num_read, span.num_ready),
                    _Span(block, span.end, span.num_read, span.num_ready),
                ]
                return

    def next_step(self, max_block_layers: int) -> ReadStep | None:
        """What to read next: the oldest blocks first, at most so many blocks times layers (at least one block)."""
        for span in self._spans:
            num_layers = span.num_ready - span.num_read
            if num_layers:
                end = min(span.end, span.first + max(1, max_block_layers // num_layers))
                self._cut(end)
                return ReadStep(span.first, end, span.num_read, span.num_ready)
        return None

    def note_read(self, step: ReadStep) -> None:
        """It has been read."""
        span = next(each for each in self._spans if each.first == step.first)
        span.num_read = step.end_layer
        if span.num_read == self._num_layers:
            self._spans.remove(span)
