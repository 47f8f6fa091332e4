"""What the blocks of a request are found by in the tree: their tokens, and the extra keys of those that have any."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec


class BlockKeys(msgspec.Struct, gc=False, eq=False):
    """The packed tokens of a request in two buffers, as `Request` has them: a prompt, which never changes and is never
    moved, and the output behind it, which grows. Readers ask for the bytes [start, end) of both together."""

    prompt: bytes
    output: bytearray
    extras: Mapping[int, bytes] | None

    def __repr__(self) -> str:
        """The size: tokens would be a page."""
        return f"BlockKeys({len(self.prompt) + len(self.output)} bytes)"

    def part(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the tokens. Only what lies across the border is put together."""
        border = len(self.prompt)
        if end <= border:
            return self.prompt[start:end]
        if start >= border:
            return bytes(memoryview(self.output)[start - border : end - border])
        return self.prompt[start:] + memoryview(self.output)[: end - border]

    def key(self, block: int, block_bytes: int) -> bytes:
        """What a run that begins with this block is found under."""
        tokens = self.part(block * block_bytes, (block + 1) * block_bytes)
        return tokens if self.extras is None else tokens + self.extras.get(block, b"")

    def buffer(self, start: int, end: int) -> tuple[bytes, int]:
        """Bytes that hold [start, end) of the tokens, and where in them `start` is. Copies nothing of the prompt."""
        if end <= len(self.prompt):
            return self.prompt, start
        return self.part(start, end), 0
