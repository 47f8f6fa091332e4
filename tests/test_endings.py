"""How a run of the tests ends: nothing of a failed test goes on, Ctrl-C works, and what was skipped is counted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.rigs.leaks import new_shm_files, shm_files

ROOT = Path(__file__).parent.parent
pytestmark = pytest.mark.processes
_SECONDS = 60
TESTS = """
import signal, subprocess, sys
import pytest

from tests.rigs.leaks import new_shm_files, shm_files

pytestmark = pytest.mark.processes

def test_it_leaves_a_process(tmp_path_factory):
    process = subprocess.Popen(["sleep", "600"])
    open("PID", "w").write(str(process.pid))
    raise AssertionError

def test_it_fails_beside_a_process():
    with subprocess.Popen(["sleep", "600"]) as process:
        raise AssertionError

def test_children_hear_of_ctrl_c():
    code = "import signal; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run([sys.executable, "-c", code], check=True)

@pytest.mark.parametrize("number", [1, 2])
def test_without_a_server(number): pytest.skip("needs a server")
@pytest.mark.skipif(True, reason="needs a GPU")
def test_without_a_gpu(): ...
"""


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a run that was started with SIGINT ignored, as `nohup COMMAND &` does, and what it printed."""
    folder = tmp_path_factory.mktemp("planted")
    (folder / "test_planted.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-p", "tests.conftest", "-c", "/dev/null", f"--rootdir={folder}"]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # a child has it so, too
    try:
        done = subprocess.run(
            [*command, "--skipped-to", str(folder / "skipped"), str(folder)],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=_SECONDS,
            check=False,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)
    return folder, done.stdout


def test_what_a_failed_test_has_left_is_killed(ended: tuple[Path, str]) -> None:
    """It is named as left behind, and its process is gone."""
    folder, printed = ended
    pid = (folder / "PID").read_text()
    assert f"left behind: processes {{{pid}}}" in printed and not Path(f"/proc/{pid}").exists()


def test_children_of_tests_can_be_interrupted(ended: tuple[Path, str]) -> None:
    """Where the run itself has SIGINT ignored, what a test starts has not."""
    assert "2 failed, 1 passed, 3 skipped, 1 error" in ended[1]


def test_skips_are_counted_by_reason_and_listed(ended: tuple[Path, str]) -> None:
    """One line for each reason, and a file that another run can be given."""
    folder, printed = ended
    assert "    2  needs a server" in printed and "    1  needs a GPU" in printed
    names = ["test_without_a_gpu", "test_without_a_server[1]", "test_without_a_server[2]"]
    assert (folder / "skipped").read_text().splitlines() == [f"test_planted.py::{name}" for name in names]


def test_a_semaphore_of_another_program_is_not_ours() -> None:
    """Others may use multiprocessing meanwhile: their semaphores lie in /dev/shm, and are mapped under another name."""
    code = (
        "import multiprocessing, sys; lock = multiprocessing.get_context('spawn').Lock();"
        "print(lock._semlock.name, flush=True); sys.stdin.read()"
    )
    before = shm_files()
    # A shell in between, so that the program is no child of ours.
    command = ["sh", "-c", f'"{sys.executable}" -c "$0"; true', code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as shell:
        assert shell.stdout is not None
        name = "sem." + shell.stdout.readline().strip().lstrip("/")
        assert Path("/dev/shm", name) in shm_files() - before
        assert Path("/dev/shm", name) not in new_shm_files(before)
        shell.communicate(timeout=_SECONDS)
