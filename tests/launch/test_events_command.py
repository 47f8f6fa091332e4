"""`fastdeploy-cache events` beside a cache that publishes."""

from __future__ import annotations

import json
import select
import subprocess
from pathlib import Path

import pytest

from fastdeploy_cache.ipc.peer_channel import make_keys
from tests.rigs.command_line import CLI
from tests.rigs.event_rig import endpoints, prompt, publishing, serve

pytestmark = pytest.mark.processes


def test_events_are_printed_as_they_come() -> None:
    """First how much is cached, then what comes and goes."""
    with publishing() as cache:
        serve(cache, "a", prompt(1))
        process = subprocess.Popen(
            [*CLI, "events", endpoints(cache)[0], "--seconds", "20"], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "== cached now, in blocks of 16 tokens: GPU 4, CPU 0\n"
            serve(cache, "b", prompt(1, 7))
            words = process.stdout.readline().split()
            assert words[1:5] == ["stored", "GPU", "3", "blocks:"] and words[8] == "behind"
            cache.life.clear()
            assert process.stdout.readline().split()[1:] == ["cleared", "all"]
            process.kill()


def test_events_as_json() -> None:
    """A line for each event, with everything that it says."""
    with publishing() as cache:
        process = subprocess.Popen(
            [*CLI, "events", endpoints(cache)[0], "--json", "--seconds", "30"], stdout=subprocess.PIPE, text=True
        )
        with process:
            assert process.stdout is not None
            number = 0
            while not select.select([process.stdout], [], [], 0.1)[0]:  # it may not listen yet
                number += 1
                serve(cache, f"{number}", prompt(number % 50))
                assert number < 300, "nothing is printed"
            found = json.loads(process.stdout.readline())
            if found["type"] == "cached":
                assert set(found) == {"type", "block_size", "GPU", "CPU"}
                serve(cache, "another", prompt(200))
                found = json.loads(process.stdout.readline())
            assert {"sequence", "unix_seconds", "type", "block_hashes", "medium"} <= set(found)
            assert all(len(bytes.fromhex(name)) == 32 for name in found["block_hashes"])
            process.kill()


def test_nobody_publishes_there(tmp_path: Path) -> None:
    """One line, and status 1; keys of which none can be the publisher's, too."""
    make_keys(tmp_path / "keys")
    for arguments, why in (
        (["ftp://x"], "use tcp://ADDRESS:PORT"),
        (
            ["tcp://127.0.0.1:1", "--keys-folder", str(tmp_path / "keys")],
            "has 0 keys besides your own; put the",
        ),
    ):
        done = subprocess.run([*CLI, "events", *arguments], capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 1 and why in done.stderr and "Traceback" not in done.stderr
