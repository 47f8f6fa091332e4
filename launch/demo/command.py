"""The demo as a program: play with the cache, go on after a restart, play without, compare."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from rich.console import Console

from fastdeploy_cache import CacheConfig, StorageConfig, TransferConfig
from fastdeploy_cache.errors import LaunchError, counted
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.demo.conversations import CONVERSATIONS
from fastdeploy_cache.launch.demo.report import BLOCK_TOKENS, course_of, facts, next_steps, show
from fastdeploy_cache.launch.demo.scenario import Played, play, play_again, prompt_of, warm_up
from fastdeploy_cache.launch.findings import console_beside, progress_on, write_json
from fastdeploy_cache.launch.reference_engine.hybrid_spec import hybrid_layout_of, weights_id_of, with_units
from fastdeploy_cache.launch.reference_engine.serving import layout_of
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, load_model_files

# Two answers at a time fit; all conversations together need twice the room, so the rest waits in the CPU tier.
_PROMPT_BLOCKS, _TURNS = 32, 2
_NUM_CPU_BLOCKS = 256
_STORAGE_BYTES = 1536 * 2**20
_MIN_PREFETCH_TOKENS = 32  # the prompts here are short


def demo(
    num_ranks: int,
    max_new_tokens: int,
    json_file: Path | None,
    log_dir: Path | None,
    *,
    kill: bool,
    is_hybrid: bool = False,
) -> bool:
    """Run it and print what was found; whether all checks held. `is_hybrid`: of the model of `hybrid_spec`."""
    console = console_beside(json_file, 80)
    if num_ranks not in (1, 3):
        raise LaunchError(f"--ranks is {num_ranks}; the model has 3 KV heads, so use 1 or 3")
    machine = describe_machine()  # before this has a load of its own
    console.print("Loading SmolLM2-135M-Instruct (the first time its weights are converted, about 10 s) ...")
    files = load_model_files()
    num_gpu_blocks = _PROMPT_BLOCKS + max_new_tokens * _TURNS * 4 // BLOCK_TOKENS
    console.print(_introduction(num_ranks, num_gpu_blocks, is_hybrid=is_hybrid))
    with tempfile.TemporaryDirectory(prefix="fastdeploy-cache-demo-") as folder:
        config = _config(files, num_ranks, num_gpu_blocks, log_dir, folder, is_hybrid=is_hybrid)
        cached, again, plain = _run(console, files, config, max_new_tokens, num_ranks - 1 if kill else None)
    found = {"machine": machine, **facts(cached, again, plain)}
    found["conversation"] = course_of(CONVERSATIONS[0], cached, again, ChatTokenizer(files))
    show(console, found)
    write_json(json_file, found)
    if json_file is not None:
        console.print(f"Facts written to {json_file}")
    console.print(next_steps(), soft_wrap=True)
    return all(found["checks"].values())


def _run(
    console: Console, files: ModelFiles, config: CacheConfig, max_new_tokens: int, kill_rank: int | None
) -> tuple[Played, Played, Played]:
    """Play the turns with the cache, the last ones again after a restart, and all of them with the cache off."""
    num_turns, tokenizer = len(CONVERSATIONS[0].turns), ChatTokenizer(files)
    plain_config = dataclasses.replace(config, enable_prefix_caching=False, num_cpu_blocks=None, storage=None)
    warm_up(files, plain_config, prompt_of(tokenizer, CONVERSATIONS[0], 0, np.empty(0, np.int32)))
    with progress_on(console) as progress:

        def bar(title: str, num_turns: int) -> Callable[[], None]:
            if not console.is_terminal:  # where no bar is seen until all is over
                console.print(f"Playing {title.strip()} ...")
            task = progress.add_task(title, total=len(CONVERSATIONS) * num_turns)
            return lambda: progress.advance(task)

        def run(title: str, chosen: CacheConfig, kill_rank: int | None) -> Played:
            return play(
                files,
                tokenizer,
                chosen,
                CONVERSATIONS,
                max_new_tokens=max_new_tokens,
                kill_rank=kill_rank,
                on_answer=bar(title, num_turns),
            )

        cached = run("with the cache     ", config, kill_rank)
        shown = bar("after a restart    ", 1)
        again = play_again(
            files, config, cached.last_prompts, turn=num_turns - 1, max_new_tokens=max_new_tokens, on_answer=shown
        )
        return cached, again, run("with the cache off ", plain_config, None)


def _introduction(num_ranks: int, num_gpu_blocks: int, *, is_hybrid: bool) -> str:
    hybrid = (
        "The model has windows in half of its layers, and states in three (--hybrid). The weights are SmolLM2's, which "
        "nobody has trained for that.\n"
    )
    return (hybrid if is_hybrid else "") + (
        f"{len(CONVERSATIONS)} conversations of {len(CONVERSATIONS[0].turns)} turns. Ranks: {num_ranks}, as a model on "
        f"{counted(num_ranks, 'GPU')} has.\nHere one process computes for all ranks, and each rank's transfer process "
        f"moves its KV blocks.\nGPU pool: {num_gpu_blocks} blocks of {BLOCK_TOKENS} tokens (in "
        f"shared memory on this CPU). CPU pool: {_NUM_CPU_BLOCKS} blocks. Below them a folder on disk."
    )


def _config(
    files: ModelFiles, num_ranks: int, num_gpu_blocks: int, log_dir: Path | None, folder: str, *, is_hybrid: bool
) -> CacheConfig:
    layout = hybrid_layout_of(files.spec) if is_hybrid else layout_of(files.spec)
    config = CacheConfig(
        layout=layout,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=_NUM_CPU_BLOCKS,
        min_prefetch_tokens=_MIN_PREFETCH_TOKENS,
        transfer=TransferConfig(tp_size=num_ranks, log_dir=str(log_dir) if log_dir else None),
        storage=StorageConfig(
            folder=folder, weights_id=weights_id_of(files, layout), admission="all", capacity_bytes=_STORAGE_BYTES
        ),
    )
    return with_units(config, _TURNS) if is_hybrid else config
