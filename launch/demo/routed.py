"""The demo with two instances: a router that sends each turn where its prefix is, beside one that goes by turns."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.demo.conversations import CONVERSATIONS
from fastdeploy_cache.launch.demo.routed_servers import (
    BY_PREFIX,
    BY_TURNS,
    NUM_INSTANCES,
    RoutedAnswer,
    ask,
    routed_servers,
)
from fastdeploy_cache.launch.findings import console_beside, progress_on, table_of, write_json

_NUM_ROUNDS, _AT_ONCE = 3, 2
_SEED = 35  # of the order in which the users of a turn come
_WARM_UP = [{"role": "user", "content": "How many legs has a spider, and how many has an ant?"}]


@dataclass(frozen=True)
class Turn:
    """One turn of one conversation."""

    conversation: int
    turn: int
    answer: RoutedAnswer


def routed_demo(max_new_tokens: int, json_file: Path | None, log_dir: Path | None) -> bool:
    """Play all conversations over both routers, in turn, and print what was found; whether all checks held.

    Raises:
        LaunchError: a server does not start, or a chat is not answered.
    """
    console = console_beside(json_file, 80)
    machine = describe_machine()  # before this has a load of its own
    num_turns = len(CONVERSATIONS[0].turns)
    console.print(
        f"{NUM_INSTANCES} instances, each with its own cache and events, and two routers before them.\n"
        f"{len(CONVERSATIONS)} conversations of {num_turns} turns, {_AT_ONCE} at a time. {_NUM_ROUNDS} rounds over "
        "each router,\nwhich share no cached block."
    )
    with ExitStack() as stack:
        logs = log_dir or Path(stack.enter_context(TemporaryDirectory(prefix="fastdeploy-cache-demo-")))
        logs.mkdir(parents=True, exist_ok=True)
        urls = stack.enter_context(routed_servers(logs, lambda what: console.print(f"... {what}")))
        played = _play_rounds(console, urls, max_new_tokens)
    found = {"machine": machine, **_facts(played)}
    _show(console, found, played[BY_PREFIX])
    write_json(json_file, found)
    return all(found["checks"].values())


def _play_rounds(console: Console, urls: Mapping[str, str], max_new_tokens: int) -> dict[str, list[Turn]]:
    for _ in range(NUM_INSTANCES):  # the first run of a model in a process takes longer than all later ones
        ask(urls[BY_TURNS], _WARM_UP, salt="warm-up", max_new_tokens=2)
    played: dict[str, list[Turn]] = {BY_PREFIX: [], BY_TURNS: []}
    with progress_on(console) as progress:
        total = _NUM_ROUNDS * len(CONVERSATIONS) * len(CONVERSATIONS[0].turns)
        bars = {name: progress.add_task(name, total=total) for name in played}
        for number in range(_NUM_ROUNDS):
            for name in played:  # one after the other, so that the machine's moods meet both
                order = random.Random(_SEED + number)  # noqa: S311 (a draw of a benchmark)
                advance = partial(progress.advance, bars[name])
                played[name] += _play(urls[name], order, f"{name} {number}", max_new_tokens, advance)
    return played


def _play(url: str, order: random.Random, salt: str, max_new_tokens: int, on_answer: Callable[[], None]) -> list[Turn]:
    """All conversations once; a turn of each, in an order that is drawn, then the next turn."""
    histories = [[{"role": "system", "content": each.system}] for each in CONVERSATIONS]
    turns = list[Turn]()

    def take_turn(number: int, turn: int) -> Turn:
        history = histories[number]
        history.append({"role": "user", "content": CONVERSATIONS[number].turns[turn]})
        answer = ask(url, history, salt=salt, max_new_tokens=max_new_tokens)
        history.append({"role": "assistant", "content": answer.text})
        on_answer()
        return Turn(number, turn, answer)

    with ThreadPoolExecutor(_AT_ONCE) as users:
        for turn in range(len(CONVERSATIONS[0].turns)):
            numbers = order.sample(range(len(CONVERSATIONS)), len(CONVERSATIONS))
            turns += users.map(lambda number, turn=turn: take_turn(number, turn), numbers)
    return turns


def _facts(played: Mapping[str, Sequence[Turn]]) -> dict[str, Any]:
    """All that is claimed, as plain data. Times in seconds."""
    by_router = {name: _facts_of(turns) for name, turns in played.items()}
    said = [{(t.conversation, t.turn): t.answer.text for t in turns} for turns in played.values()]
    prefix, turns = by_router[BY_PREFIX], by_router[BY_TURNS]
    checks = {
        "answers are the same over both routers": said[0] == said[1],
        "more of the prompts was cached where they were sent by prefix": prefix["token_hit_rate"]
        > turns["token_hit_rate"],
        "chats were sent where most of their prompt was": prefix["reasons"].get("prefix", 0) > 0,
    }
    return {"routers": by_router, "checks": checks}


def _facts_of(turns: Sequence[Turn]) -> dict[str, Any]:
    answers = [turn.answer for turn in turns]
    later = [turn.answer for turn in turns if turn.turn]
    return {
        "requests": len(answers),
        "prompt_tokens": sum(answer.prompt_tokens for answer in answers),
        "cached_tokens": sum(answer.cached_tokens for answer in answers),
        "token_hit_rate": _hit_rate(answers),
        "token_hit_rate_later_turns": _hit_rate(later),
        "median_seconds_to_first_token": statistics.median(answer.seconds_to_first_token for answer in answers),
        "median_seconds_to_first_token_later_turns": statistics.median(a.seconds_to_first_token for a in later),
        "reasons": dict(Counter(answer.reason for answer in answers)),
    }


def _hit_rate(answers: Sequence[RoutedAnswer]) -> float:
    return sum(answer.cached_tokens for answer in answers) / sum(answer.prompt_tokens for answer in answers)


def _show(console: Console, found: Mapping[str, Any], by_prefix: Sequence[Turn]) -> None:
    rows = []
    for name, of in found["routers"].items():
        times = [of[key] for key in ("median_seconds_to_first_token", "median_seconds_to_first_token_later_turns")]
        rates = [of["token_hit_rate"], of["token_hit_rate_later_turns"]]
        rows.append((name, of["requests"], *(f"{rate:.1%}" for rate in rates), *(f"{t * 1000:.0f} ms" for t in times)))
    columns = ("", "chats", "hit rate", "later turns", "TTFT", "later turns")
    console.print(table_of(columns, rows, words=("",)))
    reasons = found["routers"][BY_PREFIX]["reasons"]
    why = ", ".join(f"{count} by {reason}" for reason, count in sorted(reasons.items()))
    console.print("Hit rate: of prompt tokens. TTFT: median time to the first token, over HTTP.")
    console.print(f"How the router by prefix chose: {why} (see docs/routers.md of the source).")
    if found["machine"]["busy"]:
        console.print(f"[yellow]This machine was {found['machine']['busy']}.[/yellow]")
    console.print("\nOne of the conversations as the router sent it:")
    for turn in by_prefix[: len(by_prefix) // _NUM_ROUNDS]:
        if turn.conversation == 0:
            console.print(f"  {CONVERSATIONS[0].turns[turn.turn]}\n    {turn.answer.route}", soft_wrap=True)
    for check, held in found["checks"].items():
        console.print(f"[green]ok[/green]      {check}" if held else f"[red]FAILED[/red]  {check}")
