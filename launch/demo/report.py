"""What the demo found: a table for people, facts for programs, a verdict for the exit status."""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastdeploy_cache.errors import counted
from fastdeploy_cache.launch.demo.conversations import Conversation
from fastdeploy_cache.launch.demo.scenario import Answer, Played
from fastdeploy_cache.launch.findings import table_of
from fastdeploy_cache.launch.reference_engine.tokenizer import ChatTokenizer

BLOCK_TOKENS = 16
_LAUNCH = Path(__file__).resolve().parents[1]
KINDS = ("cold", "GPU hit", "CPU hit", "storage hit")


def facts(cached: Played, again: Played, plain: Played) -> dict[str, Any]:
    """Everything that the demo claims, as plain data. Times in seconds.

    `again` are the last turns, answered by an engine that was started anew; `plain` all turns without a cache.
    """
    last = plain.answers[-len(again.answers) :]
    pairs = [*zip(cached.answers, plain.answers, strict=True), *zip(again.answers, last, strict=True)]
    kinds = {}
    for kind in KINDS:
        chosen = [(with_cache, without) for with_cache, without in pairs if with_cache.kind == kind]
        kinds[kind] = {
            "requests": len(chosen),
            "prompt_tokens": sum(a.generation.request.num_prompt_tokens for a, _ in chosen),
            "tokens_reused": sum(a.generation.num_cached_tokens for a, _ in chosen),
            "median_seconds_to_first_token": _median([a for a, _ in chosen]),
            "median_seconds_to_first_token_cache_off": _median([b for _, b in chosen]),
        }
    different = [
        {"conversation": a.conversation, "turn": a.turn} for a, b in pairs if a.generation.output != b.generation.output
    ]
    return {
        "kinds": kinds,
        "hit_rates": dict(cached.stats.hit_rates),
        "hit_rates_after_restart": dict(again.stats.hit_rates),
        "task_bytes": cached.task_bytes,
        "load_seconds": cached.load_seconds,
        "waited_for_layers_seconds": cached.waited_seconds,
        "num_answers": len(pairs),
        "different_answers": different,
        "num_ranks": len(cached.stats.ranks),
        "killed_rank": cached.killed_rank,
        "rank_returned": cached.rank_returned,
        "rank_restarts": [status.num_restarts for status in cached.stats.ranks],
        "checks": _checks(cached, again, kinds, different),
    }


def course_of(
    conversation: Conversation, cached: Played, again: Played, tokenizer: ChatTokenizer
) -> list[dict[str, Any]]:
    """The first conversation as it went: what was asked and answered, and where each prompt's tokens came from."""
    answers = [(a, a.generation) for a in (*cached.answers, *again.answers) if a.conversation == 0]
    return [
        {
            "question": conversation.turns[answer.turn],
            "answer": tokenizer.decode(found.output).strip(),
            "after_restart": answer.after_restart,
            "prompt_tokens": found.request.num_prompt_tokens,
            "tokens": {"gpu": found.num_gpu_tokens, "cpu": found.num_cpu_tokens, "disk": found.num_storage_tokens},
            "seconds_to_first_token": found.seconds_to_first_token,
        }
        for answer, found in answers
    ]


def _checks(cached: Played, again: Played, kinds: dict[str, Any], different: list[dict[str, int]]) -> dict[str, bool]:
    checks = {
        "answers are token for token those computed with the cache off": not different,
        "there were cold requests, GPU hits, CPU hits and storage hits": all(kinds[kind]["requests"] for kind in KINDS),
        "blocks went to the CPU tier and came back": bool(
            cached.task_bytes["swap_out"] and cached.task_bytes["swap_in"]
        ),
    }
    found = [a.generation for a in again.answers]
    whole = all(each.request.num_prompt_tokens - each.num_cached_tokens <= BLOCK_TOKENS for each in found)
    checks["a new engine found every prompt on disk"] = cached.flushed and whole
    if cached.killed_rank is not None:
        restarted = cached.stats.ranks[cached.killed_rank].num_restarts == 1
        checks["the killed rank was restarted and is back"] = cached.rank_returned and restarted
    return checks


def show(console: Console, found: dict[str, Any]) -> None:
    """Print the facts."""
    console.print("Median time to first token (TTFT), from its match")
    rows = []
    for kind, row in found["kinds"].items():
        with_cache = row["median_seconds_to_first_token"]
        without = row["median_seconds_to_first_token_cache_off"]
        cells = (
            (_milliseconds(with_cache), _milliseconds(without), f"{without / with_cache:.1f}x") if with_cache else ()
        )
        rows.append((kind, row["requests"], row["prompt_tokens"], row["tokens_reused"], *cells))
    columns = ("", "requests", "tokens", "reused", "TTFT", "cache off", "faster")
    console.print(table_of(columns, rows, words=("",)))
    console.print(
        'A "cold" prompt was never seen: it is computed as with the cache off, so 1.0x is what to expect of it.'
    )
    if found["machine"]["busy"]:
        console.print(f"[yellow]This machine was {found['machine']['busy']}.[/yellow]")
    _show_course(console, found["conversation"])
    rates = found["hit_rates"]
    console.print(
        f"Hit rates: {rates['request']:.0%} of requests, {rates['token']:.0%} of prompt tokens "
        f"(GPU {rates['gpu']:.0%}, CPU {rates['cpu']:.0%}); after the restart "
        f"{found['hit_rates_after_restart']['token']:.0%} of prompt tokens"
    )
    swapped = {kind: num_bytes / 2**20 for kind, num_bytes in found["task_bytes"].items()}
    console.print(
        f"Swapped by {counted(found['num_ranks'], 'rank')}: {swapped['swap_out']:.1f} MiB out, "
        f"{swapped['swap_in']:.1f} MiB in"
    )
    loads, waited = found["load_seconds"], found["waited_for_layers_seconds"]
    console.print(
        f"Waiting for whole loads would have cost {_milliseconds(loads)} in all; as each layer was computed once it "
        f"was in, the model stood still for {_milliseconds(waited)}"
    )
    if found["killed_rank"] is not None:
        console.print(f"Rank {found['killed_rank']} was killed (SIGKILL) before the last turns")
    for check, held in found["checks"].items():
        console.print(f"[green]ok[/green]      {check}" if held else f"[red]FAILED[/red]  {check}")
    for answer in found["different_answers"]:
        console.print(f"        differs: conversation {answer['conversation']}, turn {answer['turn']}")


def _show_course(console: Console, course: list[dict[str, Any]]) -> None:
    lines = Table.grid(padding=(0, 2))
    for turn in course:
        sources = [f"{num} from {tier}" for tier, num in turn["tokens"].items() if num]
        num_computed = turn["prompt_tokens"] - sum(turn["tokens"].values())
        came = (
            f"{counted(turn['prompt_tokens'], 'token')} of prompt: {', '.join([*sources, f'{num_computed} computed'])}"
        )
        if turn["after_restart"]:
            lines.add_row("", Text("(the engine is started again, and asked the same)"))
        lines.add_row(" user", Text(turn["question"]))
        lines.add_row(" answer", Text(turn["answer"]))
        lines.add_row("", Text(f"{came}; first token after {_milliseconds(turn['seconds_to_first_token'])}"))
    console.print("\nOne of the conversations as it went:", lines, "", sep="\n")


def _median(answers: list[Answer]) -> float | None:
    return statistics.median(a.generation.seconds_to_first_token for a in answers) if answers else None


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms"


def next_steps(launch: Path = _LAUNCH) -> str:
    """What to do after the demo: commands that work where it was run.

    `launch` is the folder of our programs: that of a checkout has scripts, and pages beside it.
    """
    if (launch / "start.sh").is_file():
        root = os.path.relpath(launch.parent)
        steps = {
            f"{root}/launch/start.sh": "a server with OpenAI's API at 127.0.0.1:8000",
            f"{root}/launch/engines.sh vllm": "a real vLLM with the cache, and without it",
            f"less {root}/docs/engine.md": "the cache in an engine of your own",
        }
    else:
        steps = {
            "fastdeploy-cache start": "a server with OpenAI's API at 127.0.0.1:8000",
            "fastdeploy-cache engines vllm": "an installed vLLM with the cache, and without it",
            "python -m pydoc fastdeploy_cache.PrefixCacheManager": "the cache in an engine of your own",
        }
    width = max(map(len, steps))
    return "\n".join(["", "What next?", *(f"  {step:{width}}   {meaning}" for step, meaning in steps.items())])
