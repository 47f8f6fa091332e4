"""A live view of a running cache."""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fastdeploy_cache.errors import counted
from fastdeploy_cache.launch.findings import fitted, table_of
from fastdeploy_cache.launch.operating.text import hit_rates_line, ranks_table, state_word

_NUM_CAUSES = 6


def watch(status: Callable[[], tuple[dict[str, Any], int]], every_seconds: float, console: Console) -> tuple[str, int]:
    """Show the state of a cache again and again, until Ctrl-C or until it does not answer: then what is wrong, and the
    exit status. Where the console is no terminal, each view is printed below the last one."""
    waiting, before, seen_at = threading.Event(), dict[str, Any](), 0.0
    if console.is_terminal:  # what is wider would wrap, and leave its lines behind at the next view
        console.width = shutil.get_terminal_size().columns
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        while True:
            document, code = status()
            if code:
                return str(document["problem"]), code
            now = time.monotonic()
            view = view_of(console, document, before, now - seen_at)
            if console.is_terminal:
                live.update(view, refresh=True)
            else:
                console.print(view)
            before, seen_at = document, now
            waiting.wait(every_seconds)


def view_of(console: Console, document: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> Group:
    """Tiers, rates, ranks, queues and causes; `before` is the document of `seconds` earlier, or empty."""
    head = (
        f"pid {document['pid']}, {document['life_cycle']}, {counted(document['requests'], 'request')}, eviction policy "
        f"{document['eviction_policy']}, {counted(document['pins'], 'pin')}"
    )
    parts: list[RenderableType] = [
        Text(head),
        fitted(console, _tiers(document, before, seconds)),
        Text(hit_rates_line(document)),
        _queues(document),
    ]
    if document["ranks"]:
        parts.append(fitted(console, ranks_table(document)))
    missed = sorted(document["missed_tokens"].items(), key=lambda item: -item[1])[:_NUM_CAUSES]
    missed_before = before.get("missed_tokens", {})
    rows = [(cause, count, _change(count, missed_before.get(cause))) for cause, count in missed if count]
    causes = table_of(("cause", "tokens missed", "since the last view"), rows, words=("cause",))
    return Group(*parts, fitted(console, causes) if rows else Text("no token was missed yet"))


def _tiers(document: Mapping[str, Any], before: Mapping[str, Any], seconds: float) -> Table:
    states, rows = list(document["tiers"]["gpu"]), []
    copied = {"gpu": "swapped_in_blocks", "cpu": "swapped_out_blocks"}
    for tier, counts in document["tiers"].items():
        gone, came = document["evicted_blocks"][tier], document[copied[tier]]
        gone_before = before.get("evicted_blocks", {}).get(tier)
        rates = _rate(gone, gone_before, seconds), _rate(came, before.get(copied[tier]), seconds)
        rows.append((tier.upper(), *(counts[state] for state in states), gone, *rates))
    return table_of(("tier", *map(state_word, states), "evicted", "evicted/s", "in/s"), rows, words=("tier",))


def _queues(document: Mapping[str, Any]) -> Text:
    return Text(
        f"in flight: {counted(document['transfers_in_flight'], 'copy')}, {counted(document['open_sends'], 'send')}, "
        f"{counted(document['open_receives'], 'receive')}; "
        f"quarantined: {counted(document['quarantined_blocks'], 'block')}"
    )


def _rate(now: int, before: int | None, seconds: float) -> str:
    return "-" if before is None or seconds <= 0 else f"{max(0, now - before) / seconds:.1f}"


def _change(now: int, before: int | None) -> str:
    return "-" if before is None else f"+{max(0, now - before)}"
