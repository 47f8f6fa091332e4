"""An engine that is out of descriptors: it lives, its processes come back, and what is missing is said."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.processes

SECONDS = 120.0


def run(mode: str, *options: str) -> tuple[dict[str, Any], str]:
    """What `short_program` says, and its log; it has ended by itself, and in order."""
    command = [sys.executable, "-m", "tests.rigs.short_program", mode, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found, done.stderr


def test_children_that_die_without_descriptors_come_back() -> None:
    """Rank, storage and peer process are killed while nothing can be opened: no death but these is counted, each is
    seen to wait, verbs go on, and all are back once there are descriptors again."""
    found, log = run("later")
    assert found["states"] == {"transfer": "short", "storage": "short", "peer": "short"}
    assert sorted(found["numbers"]) == [["peer", 0, 2], ["storage", 0, 2], ["transfer", 0, 2]]
    for kind, trouble in zip(found["states"], found["troubles"], strict=True):
        assert f"the {kind} process of rank 0 waits for descriptors" in trouble and "may have 150 open files" in trouble
    (finding,) = found["findings"]
    assert finding.startswith("process_waits: The transfer process") and "So do 2 more" in finding
    assert found["blocks"] == 5
    assert found["restarts"] == {"transfer": 1, "storage": 1, "peer": 1}
    assert found["findings_after"] == [] and found["metrics_after"] == [0.0, 0.0, 0.0]
    assert log.count("event=rank_waits ") == 3 and log.count("event=rank_died") == 3 and "rank_off" not in log


def test_children_that_are_short_in_their_start_come_back() -> None:
    """Rank, storage and peer process are killed, and the new ones find no descriptors once they run: no death but these
    is counted, however often that is, each says what it lacked, and all are back once they find some."""
    found, log = run("starting", "7")
    assert set(found["reasons"]) == {"transfer", "storage", "peer"}
    for reason in found["reasons"].values():
        assert "Too many open files" in reason and "may have 7 open files" in reason
    assert found["restarts"] == {"transfer": 1, "storage": 1, "peer": 1}
    assert log.count("event=rank_waits ") == 3 and log.count("event=rank_died") == 3 and "rank_off" not in log


def test_a_first_start_waits_for_descriptors() -> None:
    """It is tried again, within the time that a start may take, and counts no restart."""
    found, log = run("first-late")
    assert found == {"restarts": 0, "up": True} and log.count("event=rank_waits ") == 1


def test_a_first_start_without_descriptors_names_the_limit() -> None:
    """After its time: an error with the limit, its value, and what to do."""
    found, _ = run("first")
    assert found["seconds"] >= 1.0
    for words in ("cannot be spawned", "Too many open files", "RLIMIT_NOFILE", "may have 150 open files", "ulimit -n"):
        assert words in found["error"]


def test_a_rank_that_is_off_is_said_and_comes_back_when_asked() -> None:
    """After real deaths: by the doctor, with the verb that mends it, and among the troubles of the status."""
    found, _ = run("off")
    (finding,) = found["findings"]
    assert finding.startswith("rank_off: Rank 0 has died too often") and "restart-rank" in finding
    assert found["troubles"] == ["the transfer process of rank 0 is off, since it has died too often"]
    assert found["restarted"] == [[0], []] and found["up"]
    assert found["findings_after"] == []


def test_children_take_all_files_that_they_may_and_the_engine_keeps_its_limit() -> None:
    """Rank, storage, peer and what-if process raise their soft limit to the hard one; a process that embeds the cache
    has its own for reasons of its own."""
    found, _ = run("limits")
    assert found == {"num_children": 4, "own": [150, 300]}


def test_our_commands_take_all_files_that_they_may() -> None:
    """As servers and supervisors they have many clients and children."""
    program = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (150, 300))\n"
        "from fastdeploy_cache.launch.cli import main\n"
        "sys.argv = ['fastdeploy-cache', '--version']\n"
        "try: main()\n"
        "except SystemExit: print(resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=SECONDS, check=True)
    assert done.stdout.splitlines()[-1] == "(300, 300)"
