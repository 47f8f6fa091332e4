"""`simulate-faults` as a command: what it refuses, what it writes, and what Ctrl-C leaves."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.faults import command
from fastdeploy_cache.launch.faults.drawing import new_story
from fastdeploy_cache.launch.faults.search import ALL_FAULTS
from fastdeploy_cache.launch.faults.story import Fault, to_json
from fastdeploy_cache.launch.interrupts import STATUS
from tests.simulation import planted, planting

_STORY = to_json(new_story(3, ALL_FAULTS))
# Ctrl-C comes in the midst of the third story, from another thread
_INTERRUPTED = """
import os, signal, sys, threading
from fastdeploy_cache.launch.__main__ import main
from fastdeploy_cache.launch.faults import search
run, stories = search.run_story, []
def run_story(story, watches=()):
    stories.append(story)
    if len(stories) == 3:
        threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGINT)).start()
    return run(story, watches)
search.run_story = run_story
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = ["fastdeploy-cache", "simulate-faults", "--minutes", "1", "--seed", "3", "--json", "-"]
main()
"""


def in_one_line(output: str) -> str:
    """What a command says, without the frame and the line breaks of a narrow terminal."""
    return " ".join(output.replace("│", " ").split())


def test_it_says_what_it_saw() -> None:
    """Counts of a short search, and for each fault the phases that it met."""
    result = CliRunner().invoke(app, ["simulate-faults", "--steps", "20000", "--seed", "3", "--json", "-"])
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["num_steps"] >= 20000 and document["counts"]["blocks compared"] > 0
    assert document["found"] == [] and not document["interrupted"]
    assert (document["seed"], document["faults_drawn"]) == (3, list(ALL_FAULTS)) and document["version"]
    assert all(name in ALL_FAULTS for name in document["met"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--faults", "kill rank,kil storage"], "'kil storage' is no fault; known: kill rank,"),
        (["--story", "not-there.json"], "No such file or directory"),
        (["--faults", ","], "--faults names none; known: kill rank,"),
        (["--story", "any.json", "--faults", "kill rank"], "it takes no other option"),
        (["--story", "any.json", "--json", "-"], "it takes no other option"),
        (["--story", "any.json", "--minutes", "9"], "it takes no other option"),
        (["--steps", "1", "--json", "/dev/full"], "cannot write /dev/full: No space left on device"),
        (["--minutes", "0"], "Invalid value for '--minutes'"),
        (["--minutes", "inf"], "Invalid value for '--minutes'"),
        (["--json", "/nowhere/found.json"], "cannot write /nowhere/found.json: its folder does not exist"),
    ],
)
def test_bad_options_are_refused(arguments: list[str], words: str) -> None:
    """A line that names what is wrong, and status 2."""
    result = CliRunner().invoke(app, ["simulate-faults", *arguments])
    assert result.exit_code == 2 and words in in_one_line(result.output), result.output


@pytest.mark.parametrize(
    ("damaged", "words"),
    [
        (_STORY[: len(_STORY) // 2], "is no story, or is cut short"),
        (_STORY.replace(b'"version": 3', b'"version": 99'), "is a story of version 99; this program knows version 3"),
        (_STORY.replace(b'"admit"', b'"adopt"'), "'adopt' is no verb; known: admit,"),
        (_STORY.replace(b'"tp_size"', b'"num_users": 3, "tp_size"'), "it has to have 3 users for each of 1 engines"),
        (_STORY.replace(b'"tp_size": ', b'"tp_size": 3'), "Expected `int` <= 16 - at `$.settings.tp_size`"),
        (_STORY.replace(b'"num_gpu_blocks": ', b'"num_gpu_blocks": -'), ">= 1 - at `$.settings.num_gpu_blocks`"),
        (_STORY.replace(b'"tp_size"', b'"tp_size_"'), "unknown field `tp_size_` - at `$.settings`"),
        (_STORY.replace(b'"tp_size"', b'"eviction_policy": "luck", "tp_size"'), "Invalid enum value 'luck'"),
        (_STORY.replace(b'"tp_size"', b'"has_peers": true, "tp_size"'), "are two or more"),
        (
            _STORY.replace(b'"tp_size"', b'"has_store": false, "tp_size"'),
            "needs has_store, which its settings have not",
        ),
        (b'{"found": [], "num_stories": 3}', "is of a search that has found nothing; there is no story in it"),
    ],
)
def test_a_bad_story_is_refused(tmp_path: Path, damaged: bytes, words: str) -> None:
    """A file that is cut short, of another version, or that cannot be run: one line, and status 2."""
    file = tmp_path / "story.json"
    file.write_bytes(damaged)
    assert damaged != _STORY
    result = CliRunner().invoke(app, ["simulate-faults", "--story", str(file)])
    assert result.exit_code == 2 and words in in_one_line(result.output), result.output


def test_a_story_is_run_again(tmp_path: Path) -> None:
    """The same steps each time; one with an unknown fault is refused."""
    story = new_story(3, ALL_FAULTS)
    file = tmp_path / "story.json"
    file.write_bytes(to_json(story))
    said = [CliRunner().invoke(app, ["simulate-faults", "--story", str(file)]) for _ in range(2)]
    assert [result.exit_code for result in said] == [0, 0]
    assert said[0].output == said[1].output and "steps, digest" in said[0].output
    assert "nothing was found" in said[0].output
    file.write_bytes(b'{"num_stories": 1, "found": [{"kind": "wrong bytes", "story": %b}]}' % to_json(story))
    assert CliRunner().invoke(app, ["simulate-faults", "--story", str(file)]).output == said[0].output
    for fault, words in (
        (Fault(5, "earthquake"), "'earthquake' is no fault"),
        (Fault(5, "kill rank,stop rank"), "'kill rank,stop rank' is no fault"),
        (Fault(5, "kill rank", phase="lunch"), "'lunch' is no phase; known: transfer: swap_in,"),
    ):
        file.write_bytes(to_json(msgspec.structs.replace(story, faults=(fault,))))
        result = CliRunner().invoke(app, ["simulate-faults", "--story", str(file)])
        assert result.exit_code == 2 and words in in_one_line(result.output)


def test_ctrl_c_while_a_story_is_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of five that were found none is lost: each is named with its seed before the first is made short."""

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "shortest", interrupted)
    with planting.in_place(planted.named("a release keeps its own blocks")):
        result = CliRunner().invoke(app, ["simulate-faults", "--seed", "3"])
    assert result.exit_code == STATUS, result.output
    found = re.findall(r"^books do not add up, seed (\d+): .+", result.output, re.MULTILINE)
    assert len(found) == len(set(found)) == 5, result.output


@pytest.mark.processes
def test_ctrl_c_shows_what_was_seen() -> None:
    """Status 130, the counts of the stories that had ended, and nothing of a traceback."""
    program = [sys.executable, "-c", _INTERRUPTED]
    result = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == STATUS, result.stderr
    document = json.loads(result.stdout)
    assert document["interrupted"] and document["num_stories"] == 3
    assert "3 stories" in result.stderr and "Traceback" not in result.stderr


def test_the_benchmark_has_its_baseline() -> None:
    """Steps of stories and of the bare loop, from the same run, and what the steps were full of."""
    result = CliRunner().invoke(app, ["bench", "simulation", "--steps", "5000", "--json", "-"])
    assert result.exit_code in {0, 1}, result.output  # how fast it is, is the benchmark's
    figures = json.dumps(json.loads(result.stdout))
    assert all(word in figures for word in ("bare loop", "stories", "blocks compared", "file calls"))
