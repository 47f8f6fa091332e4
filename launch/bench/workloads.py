"""Made-up and recorded request streams for the control-plane benchmark. Seeded: every run serves the same tokens."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fastdeploy_cache.launch.simulator.trace import read_trace

Tokens = np.ndarray[Any, np.dtype[np.int32]]
_VOCABULARY = 50_000


@dataclass(frozen=True)
class Work:
    """One request: its prompt, and the output that the engine will sample."""

    prompt: Tokens
    output: Tokens


@dataclass(frozen=True)
class Workload:
    """Requests in order; `num_in_flight` of them are served at a time."""

    name: str
    works: list[Work]
    block_size: int
    pool_tokens: int
    num_in_flight: int

    @property
    def num_blocks(self) -> int:
        """Blocks of prompts and outputs."""
        return sum((len(work.prompt) + len(work.output)) // self.block_size for work in self.works)


def chat(block_size: int = 64, num_requests: int = 600) -> Workload:
    """Multi-turn conversations over 8 shared system prompts; prompts of 0.5k to 32k tokens, outputs of 32 to 384."""
    rng = np.random.default_rng(1)
    systems = [_text(rng, int(length)) for length in rng.integers(300, 4000, 8)]
    talks: list[Tokens] = []
    works = []
    for _ in range(num_requests):
        if len(talks) < 30 or rng.random() < 0.04:
            talks.append(systems[rng.integers(8)])
            index = len(talks) - 1
        else:
            index = int(rng.integers(len(talks)))
        prompt = np.concatenate([talks[index], _text(rng, int(rng.integers(100, 2500)))])
        if len(prompt) > 32_000:
            prompt = np.concatenate([systems[rng.integers(8)], _text(rng, 500)])
        output = _text(rng, int(rng.integers(32, 384)))
        talks[index] = np.concatenate([prompt, output])
        works.append(Work(prompt, output))
    return Workload(f"chat, block {block_size}", works, block_size, 655_360, 8)


def long(block_size: int = 64, num_requests: int = 60) -> Workload:
    """Prompts of 128k tokens, of which 90 % are one of 4 documents."""
    rng = np.random.default_rng(2)
    length = 131_072
    shared = length * 9 // 10
    documents = [_text(rng, shared) for _ in range(4)]
    works = [
        Work(np.concatenate([documents[i % 4], _text(rng, length - shared)]), _text(rng, 256))
        for i in range(num_requests)
    ]
    return Workload(f"long, block {block_size}", works, block_size, 1_310_720, 4)


def recorded(path: Path, trace_block_size: int, block_size: int = 64, num_requests: int = 400) -> Workload:
    """The first requests of a trace file; equal hash ids become equal tokens."""
    trace = read_trace(path, trace_block_size, trace_block_size)
    rng = np.random.default_rng(3)
    works = []
    for request in trace.requests[:num_requests]:
        ids = request.blocks.astype(np.int64)
        known = (ids[:, None] * 2_654_435_761 + np.arange(trace_block_size) * 40_503) % _VOCABULARY
        rest = _text(rng, request.num_tokens - known.size)
        works.append(Work(np.concatenate([known.ravel().astype(np.int32), rest]), _text(rng, 320)))
    return Workload(f"trace {path.name}, block {block_size}", works, block_size, 2_621_440, 8)


@dataclass(frozen=True)
class Recipe:
    """What a workload is made of, for a process that is to make the same one."""

    kind: str  # "chat", "long" or "trace"
    block_size: int = 64
    num_requests: int = 600
    trace: str = ""
    trace_block_size: int = 512

    def make(self) -> Workload:
        """Raises `LaunchError` for a bad trace."""
        if self.kind == "trace":
            return recorded(Path(self.trace), self.trace_block_size, self.block_size, self.num_requests)
        return (chat if self.kind == "chat" else long)(self.block_size, self.num_requests)


class Scale:
    """A pool full of sequences of 64 blocks of 16 tokens, then requests of 64 to 96 blocks that all evict.

    Every second one goes on from a cached sequence.
    """

    MIN_BLOCKS = 640
    block_size = 16
    num_sequence_blocks = 64
    num_in_flight = 4

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._rng = np.random.default_rng(4)
        self._recent: deque[Tokens] = deque(maxlen=64)

    def fill(self) -> Iterator[Work]:
        """Sequences that fill the pool."""
        for _ in range(self.num_blocks // self.num_sequence_blocks):
            sequence = _text(self._rng, self.num_sequence_blocks * self.block_size)
            self._recent.append(sequence)
            yield Work(sequence, _text(self._rng, 0))

    def more(self, num_requests: int) -> list[Work]:
        """Requests for the full pool."""
        works = []
        for i in range(num_requests):
            new_blocks = int(self._rng.integers(64, 97))
            start = (
                self._recent.popleft()[: self.num_sequence_blocks * self.block_size - 1]
                if i % 2
                else _text(self._rng, 0)
            )
            new = _text(self._rng, new_blocks * self.block_size - len(start))
            prompt = np.concatenate([start, new])
            if not i % 2:
                self._recent.append(prompt)
            works.append(Work(prompt, _text(self._rng, 64)))
        return works


def _text(rng: np.random.Generator, length: int) -> Tokens:
    return rng.integers(0, _VOCABULARY, length, dtype=np.int32)
