"""The same conversations under every calling convention: equal answers, and what each has found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from fastdeploy_cache import CacheConfig, TransferConfig
from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.conventions.by_block import FastDeployV0, FastDeployV1, Native, VllmPool
from fastdeploy_cache.launch.conventions.by_slot import ContiguousSlots, MiniSGLang, SGLang
from fastdeploy_cache.launch.conventions.calls import Answer, Calls, Model, answer
from fastdeploy_cache.launch.demo.conversations import CONVERSATIONS, Conversation
from fastdeploy_cache.launch.findings import check_target, console_beside, write_json
from fastdeploy_cache.launch.reference_engine.serving import layout_of
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, load_model_files

BLOCK_TOKENS = 16
_NUM_CPU_BLOCKS, _SLOT_BLOCKS = 256, 32


@dataclass(frozen=True)
class Played:
    """One convention's answers, in the order of (turn, conversation), and their time."""

    name: str
    token_granularity: int
    answers: tuple[Answer, ...]
    num_prompt_tokens: int
    num_swapped_in_blocks: int
    seconds: float

    @property
    def num_hit_tokens(self) -> int:
        """Of all prompts."""
        return sum(each.num_hit_tokens for each in self.answers)


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


def play(
    files: ModelFiles, calls: Calls, conversations: Sequence[Conversation], num_turns: int, num_new_tokens: int
) -> Played:
    """A turn of every conversation, then the next; the books have to add up at the end."""
    model, tokenizer = Model(files, calls.cache), ChatTokenizer(files)
    histories: list[np.ndarray] = [np.empty(0, np.int32)] * len(conversations)
    answers, num_prompt_tokens, started = list[Answer](), 0, time.monotonic()
    for turn in range(num_turns):
        for number, conversation in enumerate(conversations):
            prompt = (
                tokenizer.extend_chat(histories[number], conversation.turns[turn])
                if turn
                else _first(tokenizer, conversation)
            )
            answers.append(answer(calls, model, prompt.tolist(), num_new_tokens))
            histories[number] = np.concatenate([prompt, np.array(answers[-1].token_ids, np.int32)])
            num_prompt_tokens += len(prompt)
    seconds = time.monotonic() - started
    calls.cache.wait_for_transfers(calls.cache.config.transfer.task_timeout_seconds)
    calls.cache.check_invariants()
    num_loaded = calls.cache.stats().num_swapped_in_blocks
    return Played(calls.name, calls.token_granularity, tuple(answers), num_prompt_tokens, num_loaded, seconds)


def _first(tokenizer: ChatTokenizer, conversation: Conversation) -> np.ndarray:
    said = [("system", conversation.system), ("user", conversation.turns[0])]
    return tokenizer.encode_chat([{"role": role, "content": content} for role, content in said])


def conventions(num_ranks: int, num_gpu_blocks: int, num_new_tokens: int, json_file: Path | None) -> bool:
    """Play all and print what was found; whether all answers are equal."""
    if num_ranks not in (1, 3):
        raise LaunchError(f"--ranks is {num_ranks}; the model has 3 KV heads, so use 1 or 3")
    console = console_beside(json_file, 80)
    check_target(json_file)
    files = load_model_files()
    config = new_config(files, num_ranks, num_gpu_blocks)
    console.print(_introduction(config, num_new_tokens))
    played = []
    for new in new_conventions(config, num_new_tokens, f"conventions{os.getpid()}"):
        calls = new()
        try:
            played.append(play(files, calls, CONVERSATIONS, len(CONVERSATIONS[0].turns), num_new_tokens))
        finally:
            calls.close()
        same = "the same answers" if _same(played[-1], played[0]) else "OTHER ANSWERS"
        console.print(f"{calls.name}: {same}, {played[-1].seconds:.1f} s")
    _show(console, played)
    write_json(json_file, _facts(played))
    return all(_same(each, played[0]) for each in played)


def _introduction(config: CacheConfig, num_new_tokens: int) -> str:
    num_gpu, num_cpu = config.pool_sizes()
    return (
        f"{len(CONVERSATIONS)} conversations of {len(CONVERSATIONS[0].turns)} turns, {num_new_tokens} tokens each, "
        f"over {num_gpu} GPU and {num_cpu} CPU blocks of {BLOCK_TOKENS} tokens; about 15 s for each convention."
    )


def new_config(files: ModelFiles, num_ranks: int, num_gpu_blocks: int) -> CacheConfig:
    """The cache that all conventions share the settings of."""
    return CacheConfig(
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=_NUM_CPU_BLOCKS,
        layout=layout_of(files.spec),
        cpu_write_policy="write_through",  # the pool is so small that nothing could be copied ahead of need
        load_policy="always",  # or what is found would depend on how busy the machine is
        transfer=TransferConfig(tp_size=num_ranks),
    )


def _same(one: Played, other: Played) -> bool:
    return [a.token_ids for a in one.answers] == [a.token_ids for a in other.answers]


def _facts(played: Sequence[Played]) -> dict[str, object]:
    return {
        each.name: {
            "token_granularity": each.token_granularity,
            "num_prompt_tokens": each.num_prompt_tokens,
            "num_hit_tokens": each.num_hit_tokens,
            "num_swapped_in_blocks": each.num_swapped_in_blocks,
            "same_answers": _same(each, played[0]),
            "seconds": each.seconds,
        }
        for each in played
    }


def _show(console: Console, played: Sequence[Played]) -> None:
    table = Table(title=f"{played[0].num_prompt_tokens} prompt tokens; answers compared with the native ones")
    for column in ("convention", "granule", "hit", "loaded", "answers", "time"):
        table.add_column(column, justify="left" if column == "convention" else "right")
    for each in played:
        table.add_row(
            each.name,
            f"{each.token_granularity}",
            f"{each.num_hit_tokens / each.num_prompt_tokens:.0%}",
            f"{each.num_swapped_in_blocks} blocks",
            "same" if _same(each, played[0]) else "DIFFERENT",
            f"{each.seconds:.1f} s",
        )
    console.print(table)
