"""`simulate --hints`: what requests of a trace say of themselves, and what comes of it."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.simulator.trace import Trace, read_trace
from fastdeploy_cache.launch.simulator.trace_hints import with_hints

_NUM_SESSIONS, _BLOCKS = 60, 8


def lines(*, with_sessions: bool) -> list[dict[str, Any]]:
    """Half of the sessions ask each 20 seconds, the others each 60; answers of the quick ones are short."""
    draw, found = random.Random(7), list[dict[str, Any]]()
    due = [(draw.uniform(0, 60), number) for number in range(_NUM_SESSIONS)]
    for _ in range(8000):
        at, number = min(due)
        due.remove((at, number))
        is_quick = number % 2 == 0
        line = {
            "timestamp": int(at * 1000),
            "input_length": _BLOCKS * 512,
            "hash_ids": list(range(number * _BLOCKS, (number + 1) * _BLOCKS)),
            "output_length": draw.randint(5, 20) if is_quick else draw.randint(500, 900),
        }
        found.append(line | ({"session_id": number} if with_sessions else {}))
        due.append((at + (20.0 if is_quick else 60.0) * draw.uniform(0.7, 1.4), number))
    return found


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """With session ids, and without."""
    folder = tmp_path_factory.mktemp("traces")
    for with_sessions in (True, False):
        text = "\n".join(json.dumps(line) for line in lines(with_sessions=with_sessions))
        (folder / f"{with_sessions}.jsonl").write_text(text)
    return {with_sessions: folder / f"{with_sessions}.jsonl" for with_sessions in (True, False)}


def read(path: Path) -> Trace:
    return read_trace(path, 512, 512)


def test_without_the_option_nobody_says_anything(traces: dict[bool, Path]) -> None:
    """What lines have beside the prompt counts only when it is asked for."""
    assert all(request.hint is None for request in with_hints(read(traces[True]), [], 0).requests)


def test_sessions_are_told_apart(traces: dict[bool, Path]) -> None:
    """One number for each, with the length of each answer; a trace without them is refused."""
    trace = with_hints(read(traces[True]), ["session"], 0)
    hints = [request.hint for request in trace.requests]
    assert len({hint.session for hint in hints if hint is not None}) == _NUM_SESSIONS
    lengths = [line["output_length"] for line in lines(with_sessions=True)]
    assert [hint.num_answer_tokens for hint in hints if hint is not None] == lengths
    with pytest.raises(LaunchError, match="no line of the trace has a session_id"):
        with_hints(read(traces[False]), ["session"], 0)


def test_the_future_is_told_but_for_a_share(traces: dict[bool, Path]) -> None:
    """Each request says whether its last block comes again; a fifth of them, drawn by the seed, the contrary."""
    trace = read(traces[False])
    right, wrong, again, other = (
        [hint.going for request in with_hints(trace, [name], seed).requests if (hint := request.hint) is not None]
        for name, seed in (("will_go_on", 0), ("will_go_on:0.2", 1), ("will_go_on:0.2", 1), ("will_go_on:0.2", 2))
    )
    last = {int(request.blocks[-1]): place for place, request in enumerate(trace.requests)}
    assert right == [4 if last[int(r.blocks[-1])] > place else 1 for place, r in enumerate(trace.requests)]
    num_wrong = sum(a != b for a, b in zip(right, wrong, strict=True))
    assert 0.17 < num_wrong / len(right) < 0.23
    assert wrong == again != other


@pytest.mark.parametrize("name", ["sessions", "will_go_on:2", "will_go_on:much", "will_go_on:-1", ""])
def test_what_is_no_hint_is_refused(traces: dict[bool, Path], name: str) -> None:
    """With what there is."""
    with pytest.raises(LaunchError, match=r"--hints .*; (use session|give a share)"):
        with_hints(read(traces[False]), [name], 0)


def test_who_tells_sessions_hits_more(traces: dict[bool, Path]) -> None:
    """Not half of the sessions fit: with their ids the quick ones stay."""

    def hit_rate(*more: str) -> float:
        words = ["simulate", str(traces[True]), "--gpu-blocks", "200", "--policy", "reuse", "--no-bound", "--json", "-"]
        done = CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        found = json.loads(done.stdout)
        assert found["hints"] == ([more[1]] if more else [])
        return float(found["results"][0]["token_hit_rate"])

    assert hit_rate("--hints", "session") > hit_rate() + 0.05
