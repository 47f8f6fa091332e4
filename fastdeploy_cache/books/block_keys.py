"""What the blocks of a request are found by in the tree: their tokens, and the extra keys of those that have any."""

from __future__ import annotations

from collections.abc import Mapping


class BlockKeys:
    """The packed tokens of a request in two buffers, as `Request` has them: a prompt, which never changes and is never
    moved, and the output behind it, which grows. Readers ask for the bytes [start, end) of both together."""

    __slots__ = ("extras", "output", "prompt")

    def __init__(self, prompt: bytes, output: bytearray, extras: Mapping[int, bytes] | None) -> None:
        self.prompt = prompt
        self.output = output
        self.extras = extras

    def part(self, start: int, end: int) -> bytes:
        """The bytes [start, end) of the tokens. Only what lies across the border is put together."""
        border = len(self.prompt)
        if end <= border:
            return self.prompt[start:end]
        if start >= border:
            return bytes(memoryview(self.output)[start - border : end - border])
        return self.prompt[start:] + memoryview(self.output)[: end - border]

    def buffer(self, start: int, end: int) -> tuple[bytes, int]:
        """Bytes that hold [start, end) of the tokens, and where in them `start` is. Copies nothing of the prompt."""
        if end <= len(self.prompt):
            return self.prompt, start
        return self.part(start, end), 0
