"""Tables of the operating commands on a terminal of 80 columns: names stay whole, and so do numbers."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from fastdeploy_cache.launch.findings import print_table
from fastdeploy_cache.launch.operating import text
from fastdeploy_cache.launch.operating.watch import view_of
from fastdeploy_cache.launch.storage import report

NAME, REQUEST = "65aa5a3479b4c72c", "chatcmpl-0123456789abcdef0123456789abcdef"
PREFIX = {
    "name": NAME,
    "namespace": "0123abcd",
    "num_prefix_tokens": 131072,
    "num_uses": 1234567,
    "num_tokens": 131071,
    "num_gpu_blocks": 8191,
    "num_cpu_blocks": 8192,
    "idle_seconds": 0.01,
    "num_children": 4321,
    "is_pinned": True,
    "num_blocks": 8190,
    "seconds_left": 3000.0,
}
RUNNING = {
    "request_id": REQUEST,
    "phase": "settled",
    "num_tokens": 131072,
    "num_computed_tokens": 131071,
    "num_blocks": 8192,
    "matched_tokens": {"gpu": 100001, "cpu": 3001, "storage": 1001},
    "running_seconds": 12345.6,
}
RANK = {"rank": 0, "state": "ready", "up": True, "pid": 4194303, "num_restarts": 12345, "num_busy_lanes": 2}
RATE = {
    "tier": "gpu",
    "factor": 0.5,
    "num_blocks": 10000001,
    "policy": "a-policy-of-ones-own",
    "token_hit_rate": 0.123,
    "saved_seconds": 1234567.8,
    "most_token_hit_rate": 0.9,
}
STORED = {
    "weights_id": "somebody/SomeModel-135M-Instruct@main",
    "weights_digest": "x",
    "where": "/kv/x",
    "spaces": 16,
    "ranks": [{"tp_size": 16, "ranks": list(range(16))}],
    "rank": 15,
    "tp_size": 16,
    "objects": 12345678,
    "pages": 0,
    "bytes": 9 * 10**14,
    "allocated_bytes": 8 * 10**14,
    "open_spaces": 15,
    "damaged": 1234567,
    "gone": 1234568,
}
TABLES: dict[str, tuple[Callable[[], Table], str]] = {
    "top": (lambda: text.top_table([PREFIX, PREFIX]), f"{NAME} 0123abcd 131072 1234567 8191 8192 4321"),
    "pins": (lambda: text.pins_table([PREFIX]), f"{NAME} 131071 8190 8191"),
    "requests": (lambda: text.requests_table({"running": [RUNNING]}), f"{REQUEST} 131072 131071 8192 100001 12345.6"),
    "ranks": (lambda: text.ranks_table({"ranks": [RANK]}), "up 4194303 12345"),
    "what-if": (lambda: text.what_if_table([RATE]), "GPU 0.5 10000001 a-policy-of-ones-own 12.3% 1234567.8 90.0%"),
    "ls": (lambda: report.weights_table([STORED]), "somebody/SomeModel-135M-Instruct@main 12,345,678 818.5 727.6"),
    "verify": (lambda: report.checked_table([STORED]), "somebody/SomeModel-135M-Instruct@main 1,234,567 1,234,568"),
}


def printed(show: Callable[[Console], object], width: int) -> str:
    console = Console(width=width, file=io.StringIO(), highlight=False)
    show(console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("width", [80, 60, 300])
@pytest.mark.parametrize("name", TABLES)
def test_nothing_is_cut_or_wider_than_the_terminal(name: str, width: int) -> None:
    """As a table, where there is room for it, or as lines: each name and number is there in one piece."""
    make, words = TABLES[name]
    lines = printed(lambda console: print_table(console, make()), width).splitlines()
    assert width < 80 or max(map(len, lines)) <= width
    for word in words.split():
        assert any(word in line for line in lines), (word, lines)
    assert not any("…" in line for line in lines)


def test_the_live_view_keeps_its_names_and_numbers() -> None:
    """Tiers of ten million blocks, of which many have moved: every state and both tiers are named."""
    states = ("free", "evictable", "pinned", "private", "in_flight")
    document: dict[str, Any] = {
        "pid": 1,
        "life_cycle": "running",
        "requests": 0,
        "eviction_policy": "lru",
        "pins": 0,
        "ranks": [RANK],
        "tiers": {tier: {state: 10000000 + at for at, state in enumerate(states)} for tier in ("gpu", "cpu")},
        "evicted_blocks": {"gpu": 1234567890, "cpu": 12},
        "swapped_in_blocks": 1234567,
        "swapped_out_blocks": 1,
        "hit_rates": {"token": 0.5},
        "missed_tokens": {"new_or_forgotten": 1234567890},
        "transfers_in_flight": 0,
        "open_sends": 0,
        "open_receives": 0,
        "quarantined_blocks": 0,
    }
    before = {**document, "evicted_blocks": {"gpu": 0, "cpu": 0}, "swapped_in_blocks": 0}
    for width in (80, 40):
        lines = printed(lambda console: console.print(view_of(console, document, before, 2.0)), width).splitlines()
        for word in ("GPU", "CPU", "free", "held", "10000004", "1234567890", "617283945.0", "617283.5", "4194303"):
            assert any(word in line for line in lines), (word, lines)
        assert max(map(len, lines)) <= width and not any("…" in line for line in lines)
