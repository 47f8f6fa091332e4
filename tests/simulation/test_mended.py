"""What was found and mended stays so: each mend is taken back once, and a test fails."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.simulation.mended import MENDED


@pytest.mark.processes
def test_a_test_fails_without_each_mend() -> None:
    """In a process of its own, as a test that fails leaves things behind. The suite shows that they pass otherwise."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.simulation.mended"], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(MENDED)} were taken back, and no test failed for 0" in done.stdout and len(MENDED) > 20
