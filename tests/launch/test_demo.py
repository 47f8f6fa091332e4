"""What the demo prints beside its figures: commands that work where it was run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from rich.console import Console

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.launch.bench.machine import describe_machine
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.demo import command
from fastdeploy_cache.launch.demo.report import KINDS, next_steps, show

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.parametrize("where", [".", "elsewhere"])
def test_what_comes_next_in_a_checkout_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    """Each file that is named exists, seen from where the demo was run."""
    (tmp_path / "elsewhere").mkdir()
    for name in ("launch", "docs"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path / where)
    files = [word for word in next_steps(tmp_path / "launch").split() if word.endswith((".sh", ".md"))]
    assert len(files) == 3 and all(Path(file).is_file() for file in files)


def test_what_comes_next_after_a_wheel_are_commands(tmp_path: Path) -> None:
    """A wheel has no scripts and no pages: no file is named, and each command is known."""
    text = next_steps(tmp_path)
    assert "/" not in text and ".md" not in text and ".sh" not in text
    known = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    named = re.findall(r"^  fastdeploy-cache (\S+)", text, re.MULTILINE)
    assert named == ["start", "engines"] and set(named) <= set(known)


@pytest.mark.parametrize(("load", "is_busy"), [(9.0, True), (0.5, False)])
def test_a_busy_machine_is_told_beside_the_times(monkeypatch: pytest.MonkeyPatch, load: float, is_busy: bool) -> None:
    """A cold prompt that seems slower than without a cache is no riddle then."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    row = {"requests": 1, "prompt_tokens": 9, "tokens_reused": 0, "median_seconds_to_first_token": None}
    found: dict[str, Any] = {
        "machine": describe_machine(),
        "kinds": {kind: {**row, "median_seconds_to_first_token_cache_off": None} for kind in KINDS},
        "conversation": [],
        "hit_rates": dict.fromkeys(("request", "token", "gpu", "cpu"), 0.5),
        "hit_rates_after_restart": {"token": 0.5},
        "task_bytes": {"swap_out": 0, "swap_in": 0},
        "num_ranks": 1,
        "load_seconds": 0.0,
        "waited_for_layers_seconds": 0.0,
        "killed_rank": None,
        "checks": {},
        "different_answers": [],
    }
    printed = StringIO()
    show(Console(file=printed, width=200), found)
    assert ("This machine was BUSY (load 9.0 on 2 cores): these figures mean little." in printed.getvalue()) == is_busy


def test_each_stage_is_told_when_it_begins_where_there_is_no_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe shows no bars that grow: without these lines nothing would come out of it for a minute."""
    console, told = Console(file=StringIO(), width=80), list[str]()

    def play(*_: object, on_answer: Callable[[], None], **__: object) -> SimpleNamespace:
        told.append(console.file.getvalue().rstrip().splitlines()[-1])  # type: ignore[attr-defined]
        on_answer()
        return SimpleNamespace(last_prompts=())

    for name, put in {"play": play, "play_again": play, "warm_up": str, "prompt_of": str, "ChatTokenizer": str}.items():
        monkeypatch.setattr(command, name, put if put is play else lambda *_: "")
    config: Any = CacheConfig(block_size=16, num_gpu_blocks=4, transfer_client="inline")
    nothing: Any = None
    command._run(console, nothing, config, 1, None)
    assert told == [f"Playing {stage} ..." for stage in ("with the cache", "after a restart", "with the cache off")]
