"""The fast door of the tests leaves out what starts processes, and notices what starts one without saying so."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.processes
TESTS = """
import os, subprocess, threading
import pytest

@pytest.fixture(scope="module")
def server():
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()

def wait_for_one(): subprocess.run(["true"], check=True)

def test_nothing(): pass
@pytest.mark.processes
def test_marked(): raise AssertionError("it ran")
def test_run(): wait_for_one()
def test_contained():
    try: wait_for_one()
    finally: return
def test_thread():
    thread = threading.Thread(target=wait_for_one)
    thread.start()
    thread.join()
def test_fork():
    if not os.fork(): os._exit(0)
    os.wait()
def test_spawn(): os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0)
def test_fixture(server): pass
@pytest.mark.parametrize("kind", ["here", pytest.param("apart", marks=pytest.mark.processes)])
def test_kinds(kind): assert kind == "here"
"""


def run(folder: Path, *arguments: str) -> tuple[int, set[str]]:
    """The status and the lines of the summary, in a folder of its own tests."""
    (folder / "test_planted.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.rigs.fast_door", "-c", "/dev/null", "-rA", *arguments]
    done = subprocess.run(
        [*command, f"--rootdir={folder}", str(folder)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    return done.returncode, {
        " ".join(found) for found in re.findall(r"^(ERROR|FAILED) \S+::(\S+)", done.stdout, re.MULTILINE)
    }


UNMARKED = {f"ERROR test_{name}" for name in ("run", "contained", "thread", "fork", "spawn", "fixture")}


def test_who_starts_a_process_unmarked_fails(tmp_path: Path) -> None:
    """Whether the test itself does, a thread, a fork or a fixture of its module; marked ones are not run."""
    assert run(tmp_path, "--fast") == (1, UNMARKED)


def test_without_the_option_all_run(tmp_path: Path) -> None:
    """The marked ones run too; and who starts a process unmarked is seen in every run, not in the fast one alone."""
    assert run(tmp_path) == (1, UNMARKED | {"FAILED test_marked", "FAILED test_kinds[apart]"})
