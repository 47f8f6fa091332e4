"""The same seed gives the same life, whatever the environment of the process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.processes
def test_the_same_seed_decides_the_same_in_every_process() -> None:
    """Ids, evictions and records of some walks, with two values of PYTHONHASHSEED: Python's own hash of a string or of
    bytes follows it, and so would all that is walked in the order of such hashes."""
    command = [sys.executable, "-m", "tests.rigs.determined_program"]
    processes = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | {"PYTHONHASHSEED": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        for seed in ("1", "2")
    ]
    found = [process.communicate(timeout=120)[0].splitlines() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert len(found[0]) == 9 and len(set(found[0])) == 9
    assert found[0] == found[1]
