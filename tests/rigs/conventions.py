"""The reference model under every engine's calling convention: the same conversations, and what each one found."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from fastdeploy_cache import CacheConfig, PrefixCacheManager, TransferConfig
from fastdeploy_cache.launch.demo.conversations import Conversation
from fastdeploy_cache.launch.demo.scenario import prompt_of
from fastdeploy_cache.launch.reference_engine.model import Llama
from fastdeploy_cache.launch.reference_engine.paged_kv import SequenceChunk
from fastdeploy_cache.launch.reference_engine.serving import cpu_shard, layout_of
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles
from tests.rigs.conventions_by_block import FastDeployV0, FastDeployV1, Native, VllmPool
from tests.rigs.conventions_by_slot import ContiguousSlots, MiniSGLang, SGLang

BLOCK_TOKENS = 16
_NUM_CPU_BLOCKS, _SLOT_BLOCKS = 96, 32


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


@dataclass(frozen=True)
class Played:
    """One convention's answers, in the order of (turn, conversation)."""

    name: str
    token_granularity: int
    answers: tuple[Answer, ...]
    num_prompt_tokens: int
    num_swapped_in_blocks: int

    @property
    def num_hit_tokens(self) -> int:
        """Of all prompts."""
        return sum(each.num_hit_tokens for each in self.answers)


class Model:
    """The reference model over the KV arrays of a cache."""

    def __init__(self, files: ModelFiles, cache: PrefixCacheManager) -> None:
        self._llama = Llama(files, [cpu_shard(cache, rank) for rank in range(cache.config.transfer.tp_size)])

    def next_token(self, tokens: list[int], start: int, block_ids: Sequence[int]) -> int:
        """Compute the tokens from `start` on; the likeliest next one."""
        chunk = SequenceChunk(np.array(tokens[start:], np.int32), start, np.array(block_ids, np.int32))
        return int(self._llama.forward([chunk])[0].argmax())


def new_config(files: ModelFiles, num_gpu_blocks: int) -> CacheConfig:
    """The cache that all conventions share the settings of."""
    return CacheConfig(
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=_NUM_CPU_BLOCKS,
        layout=layout_of(files.spec),
        cpu_write_policy="write_through",  # the pool is so small that nothing could be copied ahead of need
        load_policy="always",  # or what is found would depend on how busy the machine is
        transfer=TransferConfig(tp_size=1),
    )


def new_conventions(config: CacheConfig, num_new_tokens: int, suffix: str) -> list[Callable[[], Calls]]:
    """Every convention, to be made one after the other: each has ranks of its own."""
    return [
        lambda: Native(config),
        lambda: FastDeployV1(config, suffix),
        lambda: FastDeployV0(config, suffix, num_new_tokens),
        lambda: VllmPool(config),
        lambda: SGLang(config),
        lambda: MiniSGLang(config),
        lambda: ContiguousSlots(config, max(1, config.pool_sizes()[0] // _SLOT_BLOCKS)),
    ]


@contextmanager
def opened(new: Callable[[], Calls]) -> Iterator[Calls]:
    """A convention whose cache is closed afterwards."""
    calls = new()
    try:
        yield calls
    finally:
        calls.close()


def play(
    model: Model,
    tokenizer: ChatTokenizer,
    calls: Calls,
    conversations: Sequence[Conversation],
    num_turns: int,
    num_new_tokens: int,
) -> Played:
    """A turn of every conversation, then the next; the books have to add up at the end."""
    histories: list[np.ndarray] = [np.empty(0, np.int32)] * len(conversations)
    answers, num_prompt_tokens = list[Answer](), 0
    for turn in range(num_turns):
        for number, conversation in enumerate(conversations):
            prompt = prompt_of(tokenizer, conversation, turn, histories[number])
            answers.append(answer(calls, model, prompt.tolist(), num_new_tokens))
            histories[number] = np.concatenate([prompt, np.array(answers[-1].token_ids, np.int32)])
            num_prompt_tokens += len(prompt)
    calls.cache.wait_for_transfers(calls.cache.config.transfer.task_timeout_seconds)
    calls.cache.check_invariants()
    num_loaded = calls.cache.stats().num_swapped_in_blocks
    return Played(calls.name, calls.token_granularity, tuple(answers), num_prompt_tokens, num_loaded)


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
