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
    found = []
    for hash_seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": hash_seed}
        done = subprocess.run(
            [sys.executable, "-m", "tests.rigs.determined_program"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found.append(done.stdout.splitlines())
    assert len(found[0]) == 9 and len(set(found[0])) == 9
    assert found[0] == found[1]
