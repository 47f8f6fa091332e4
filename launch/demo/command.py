"""The demo as a program: play with the cache, play without, compare."""

from __future__ import annotations

from pathlib import Path

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from fastdeploy_cache import CacheConfig, TransferConfig
from launch.demo.conversations import CONVERSATIONS
from launch.demo.report import facts, show
from launch.demo.scenario import Played, play
from launch.errors import LaunchError
from launch.findings import check_target, console_beside, write_json
from launch.reference_engine.serving import layout_of
from launch.reference_engine.tokenizer import ChatTokenizer
from launch.reference_engine.weights import ModelFiles, load_model_files

_BLOCK_TOKENS = 16
# Two answers at a time fit; all conversations together need twice the room, so the rest waits in the CPU tier.
_PROMPT_BLOCKS, _TURNS = 32, 2
_NUM_CPU_BLOCKS = 256


def demo(num_ranks: int, max_new_tokens: int, json_file: Path | None, log_dir: Path | None, kill: bool) -> bool:
    """Run it and print what was found; whether all checks held."""
    console = console_beside(json_file, 80)
    if num_ranks not in (1, 3):
        raise LaunchError(f"--ranks is {num_ranks}; the model has 3 KV heads, so use 1 or 3")
    check_target(json_file)
    console.print("Loading SmolLM2-135M-Instruct (the first time its weights are converted, about 10 s) ...")
    files = load_model_files()
    tokenizer = ChatTokenizer(files)
    num_gpu_blocks = _PROMPT_BLOCKS + max_new_tokens * _TURNS * 4 // _BLOCK_TOKENS
    config = _config(files, num_ranks, num_gpu_blocks, log_dir)
    plain_config = CacheConfig(
        layout=config.layout,
        block_size=config.block_size,
        num_gpu_blocks=config.num_gpu_blocks,
        enable_prefix_caching=False,
        transfer=config.transfer,
    )
    num_turns = len(CONVERSATIONS[0].turns)
    console.print(
        f"{len(CONVERSATIONS)} conversations of {num_turns} turns; {num_ranks} transfer ranks, whose model shards "
        f"one compute process holds.\nGPU pool: {num_gpu_blocks} blocks of {_BLOCK_TOKENS} tokens (in shared memory "
        f"on this CPU). CPU pool: {_NUM_CPU_BLOCKS} blocks."
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:

        def run(title: str, chosen: CacheConfig, kill_rank: int | None) -> Played:
            bar = progress.add_task(title, total=len(CONVERSATIONS) * num_turns)
            return play(
                files,
                tokenizer,
                chosen,
                CONVERSATIONS,
                max_new_tokens=max_new_tokens,
                kill_rank=kill_rank,
                on_answer=lambda: progress.advance(bar),
            )

        cached = run("with the cache   ", config, num_ranks - 1 if kill else None)
        plain = run("with the cache off", plain_config, None)
    found = facts(cached, plain)
    show(console, found)
    write_json(json_file, found)
    if json_file is not None:
        console.print(f"Facts written to {json_file}")
    return all(found["checks"].values())


def _config(files: ModelFiles, num_ranks: int, num_gpu_blocks: int, log_dir: Path | None) -> CacheConfig:
    return CacheConfig(
        layout=layout_of(files.spec),
        block_size=_BLOCK_TOKENS,
        num_gpu_blocks=num_gpu_blocks,
        num_cpu_blocks=_NUM_CPU_BLOCKS,
        transfer=TransferConfig(tp_size=num_ranks, log_dir=str(log_dir) if log_dir else None),
    )
