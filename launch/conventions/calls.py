"""What every calling convention has to do for one sequence, and the loop that all of them run in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.launch.reference_engine.model import Llama, SequenceChunk
from fastdeploy_cache.launch.reference_engine.serving import cpu_shard
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles


class Calls(Protocol):
    """One engine's way to call its cache. One sequence at a time."""

    name: str
    token_granularity: int  # hits are multiples of it
    cache: PrefixCacheManager  # beneath

    def begin(self, prompt: list[int]) -> int:
        """Match; returns how many tokens need not be computed: all but one at most."""
        ...

    def blocks(self, num_tokens: int) -> Sequence[int]:
        """The sequence's blocks, with room for so many tokens."""
        ...

    def computed(self, tokens: list[int], num_computed: int) -> None:
        """A step has ended: so many of the tokens are computed."""
        ...

    def end(self, tokens: list[int]) -> None:
        """The sequence is over; its last token was sampled, and not computed."""
        ...

    def close(self) -> None:
        """End the cache."""
        ...


class Answer(NamedTuple):
    """What the model said, and how many prompt tokens it found cached."""

    token_ids: tuple[int, ...]
    num_hit_tokens: int


class Model:
    """The reference model over the KV arrays of a cache."""

    def __init__(self, files: ModelFiles, cache: PrefixCacheManager) -> None:
        self._llama = Llama(files, [cpu_shard(cache, rank) for rank in range(cache.config.transfer.tp_size)])

    def next_token(self, tokens: list[int], start: int, block_ids: Sequence[int]) -> int:
        """Compute the tokens from `start` on; the likeliest next one."""
        chunk = SequenceChunk(np.array(tokens[start:], np.int32), start, np.array(block_ids, np.int32))
        return int(self._llama.forward([chunk])[0].argmax())


def answer(calls: Calls, model: Model, prompt: Sequence[int], num_new_tokens: int) -> Answer:
    """Serve a whole request: the same steps whatever the convention."""
    calls.cache.wait_for_transfers(calls.cache.config.transfer.task_timeout_seconds)  # what is being copied is no room
    tokens = [int(token) for token in prompt]
    num_hit = start = calls.begin(tokens)
    while len(tokens) < len(prompt) + num_new_tokens:
        token = model.next_token(tokens, start, calls.blocks(len(tokens)))
        start = len(tokens)
        calls.computed(tokens, start)
        tokens.append(token)
    calls.end(tokens)
    return Answer(tuple(tokens[len(prompt) :]), num_hit)
