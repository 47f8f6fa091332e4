"""Ctrl-C under the commands that take long: one line, status 130, and nothing is left of what they had started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache.launch import interrupts
from fastdeploy_cache.launch.bench.report import Figure, Report
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.simulator.replay import Replay, Replayed
from tests.rigs.command_line import CLI
from tests.rigs.leaks import new_shm_files, shm_files
from tests.rigs.traces import line, write

_SECONDS, _AGAIN_SECONDS = 60, 20
_SMALL = ["--memory", "16MiB", "--repeats", "1"]


def members(group: int) -> list[int]:
    """The living processes of a session: those of its group, and of others that have begun in it."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:  # it has ended
            continue
        if int(session) == group and state != "Z":
            found.append(int(folder.name))
    return found


def interrupted(process: subprocess.Popen[str]) -> tuple[str, list[int]]:
    """Ctrl-C for a whole session: it ends with 130. What the command has said, and the processes that are left.

    Once more after a while, as a user would: Python sees a signal only behind a read where it comes between the last
    look for signals and the beginning of that read.
    """
    os.killpg(process.pid, signal.SIGINT)
    try:
        _, said = process.communicate(timeout=_AGAIN_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        _, said = process.communicate(timeout=_SECONDS)
    assert process.returncode == interrupts.STATUS, said
    return said, members(process.pid)


def opened_beside(process: subprocess.Popen[str], pipe: Path) -> int:
    """The writing end of a named pipe, once the process has opened the other one."""
    deadline = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:
            time.sleep(0.01)  # nothing tells when it has
    raise AssertionError("it does not open the pipe")


@pytest.mark.processes
@pytest.mark.parametrize(
    "arguments",
    [
        ["simulate", "PIPE", "--gpu-blocks", "9"],
        ["bench", "control", "--trace", "PIPE"],
        ["storage", "ls", "--config", "PIPE"],
        ["storage", "verify", "--remove", "--config", "PIPE"],
        ["storage", "clear", "--weights-id", "a", "--config", "PIPE"],
        ["storage", "gc", "--capacity-bytes", "0", "--config", "PIPE"],
    ],
)
def test_a_command_that_reads(arguments: list[str], tmp_path: Path) -> None:
    """Interrupted while it reads a file that does not end: one line, and no traceback."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    command = [*CLI, *(str(pipe) if word == "PIPE" else word for word in arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        descriptor = opened_beside(process, pipe)
        try:
            assert interrupted(process) == ("fastdeploy-cache: interrupted\n", [])
        finally:
            os.close(descriptor)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["bench", "transfer", *_SMALL], "CPU"),
        (["bench", "transfer", *_SMALL], "of all ranks"),
        (["bench", "storage", *_SMALL, "--reopen", "0", "--no-model"], "Files in"),
        (["bench", "peer", *_SMALL, "--link", "shm"], "GPU memory is not measured"),
        (["bench", "control", "--repeats", "1"], "Lists of tokens"),
    ],
)
def test_a_benchmark(arguments: list[str], words: str, tmp_path: Path) -> None:
    """Interrupted once it has said this: its processes, folders and shared memory have gone, and the file has what was
    measured until then."""
    shm, found = shm_files(), tmp_path / "found.json"
    folder = tmp_path / "work"
    folder.mkdir()
    environment = {**os.environ, "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
    with subprocess.Popen(
        [*CLI, *arguments, "--json", str(found)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=environment,
    ) as process:
        assert process.stdout is not None
        assert any(words in said for said in process.stdout)
        assert interrupted(process) == ("fastdeploy-cache: interrupted\n", [])
    # Python writes these words into a folder before it uses it for temporary files: who is killed then leaves them
    left = [each for each in folder.iterdir() if not (each.is_file() and each.read_bytes() in (b"", b"blat"))]
    assert left == [] and not new_shm_files(shm)
    facts = json.loads(found.read_text())
    assert facts["interrupted"] is True and facts["machine"] and isinstance(facts["figures"], list)


def test_what_a_benchmark_had_measured_is_kept(tmp_path: Path) -> None:
    """Its figures and promises until Ctrl-C are in the file; without Ctrl-C nothing is said of one."""
    with pytest.raises(KeyboardInterrupt), Report(tmp_path / "j") as report:
        report.line("copies", Figure("speed", 2.0, "GB/s"))
        raise KeyboardInterrupt
    facts = json.loads((tmp_path / "j").read_text())
    assert facts["interrupted"] is True
    assert [(each["name"], each["value"]) for each in facts["figures"]] == [("speed", 2.0)]
    with Report(tmp_path / "j") as report:
        report.end()
    assert "interrupted" not in json.loads((tmp_path / "j").read_text())


def test_what_was_replayed_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two capacities one is done at Ctrl-C: its line is printed and written, and the status is 130 all the same."""
    trace = write(tmp_path / "t", [line(0, [1, 2]), line(1, [1, 2, 3])])
    run = Replay.run

    def run_or_stop(replay: Replay, *given: object) -> Replayed:
        if replay.cache.config.num_gpu_blocks == 50:
            raise KeyboardInterrupt
        return run(replay, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(Replay, "run", run_or_stop)
    options = ["--trace-block-size", "4", "--gpu-blocks", "40,50", "--json", str(tmp_path / "j")]
    result = CliRunner().invoke(app, ["simulate", str(trace), *options, "--plot", str(tmp_path / "p.svg")])
    assert result.exit_code == interrupts.STATUS
    found = json.loads((tmp_path / "j").read_text())
    assert found["interrupted"] is True and [row["gpu_blocks"] for row in found["results"]] == [40]
    assert "lru" in result.output and (tmp_path / "p.svg").exists()


@pytest.fixture
def own_handler() -> Iterator[None]:
    """What Ctrl-C and its like do is as it was, afterwards."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("own_handler")
def test_a_second_interrupt_does_not_cut_the_end_short() -> None:
    """The first is an exception; the next comes while things are being ended, and does nothing."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    interrupts.interrupt_once()
    ended = False
    with pytest.raises(KeyboardInterrupt):
        try:
            signal.raise_signal(signal.SIGINT)
        finally:
            signal.raise_signal(signal.SIGINT)
            ended = True
    assert ended


@pytest.mark.usefixtures("own_handler")
def test_who_ignores_interrupts_goes_on_to() -> None:
    """As whatever a shell's script has started in the background."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    interrupts.interrupt_once()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


@pytest.mark.usefixtures("own_handler")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_note_is_looked_at_when_it_suits(number: int) -> None:
    """Each of them raises nothing where it comes, but at the next look; afterwards all is as it was before. Where it is
    ignored, as SIGHUP is below nohup, it stays so."""
    signal.signal(number, signal.default_int_handler)
    goes_on = False
    with pytest.raises(KeyboardInterrupt), interrupts.noted() as look:
        look()
        signal.raise_signal(number)
        goes_on = True
        look()
    assert goes_on and signal.getsignal(number) is signal.default_int_handler
    signal.signal(number, signal.SIG_IGN)
    with interrupts.noted() as look:
        signal.raise_signal(number)
        look()


@pytest.mark.processes
def test_the_end_of_a_terminal(tmp_path: Path) -> None:
    """Nobody reads any more what a search for faults says: it ends as after Ctrl-C, and its file is written."""
    found, (reader, terminal) = tmp_path / "found.json", os.openpty()
    program = (
        "import os, sys\nfrom fastdeploy_cache.launch.__main__ import main\nos.login_tty(int(sys.argv[1]))\n"
        "sys.argv = ['fastdeploy-cache', 'simulate-faults', '--minutes', '5', '--json', sys.argv[2]]\nmain()\n"
    )
    command = [sys.executable, "-c", program, str(terminal), str(found)]
    with subprocess.Popen(command, pass_fds=(terminal,)) as process:
        os.close(terminal)
        said = b""
        while b"steps" not in said:
            said += os.read(reader, 1000)
        os.close(reader)
        assert process.wait(_SECONDS) == interrupts.STATUS
    assert json.loads(found.read_text())["interrupted"] is True


@pytest.mark.processes
def test_ctrl_c_while_the_command_is_being_loaded() -> None:
    """The first second goes into imports: one line, status 130 and no traceback there, too."""
    program = (
        "import sys\nfrom fastdeploy_cache.launch import interrupts\ninterrupts._IMPORT_SECONDS = 0.001\n"
        "class Slow:\n    def find_spec(self, name, path, target=None):\n"
        "        if name == 'fastdeploy_cache.launch.cli':\n            print('in', flush=True)\n"
        "            sys.stdin.readline()\nfrom fastdeploy_cache.launch.__main__ import main\n"
        "sys.meta_path.insert(0, Slow())\nsys.argv = ['fastdeploy-cache', '--help']\nmain()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        _, said = process.communicate("go on\n", timeout=_SECONDS)
    assert (process.returncode, said) == (interrupts.STATUS, "fastdeploy-cache: interrupted\n")


@pytest.mark.processes
def test_children_that_hear_of_none() -> None:
    """SIGINT for a child that was started so changes nothing; it ends by SIGTERM."""
    with interrupts.kept_from_children():
        child = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with child:
        assert child.stdin is not None and child.stdout is not None
        child.send_signal(signal.SIGINT)
        child.stdin.write(b"here\n")
        child.stdin.flush()
        assert child.stdout.readline() == b"here\n"
        child.terminate()
        assert child.wait(_SECONDS) == -signal.SIGTERM


@pytest.mark.processes
def test_a_module_that_swallows_what_is_raised_while_it_is_imported(tmp_path: Path) -> None:
    """As compiled ones do: the interrupt comes once it has been imported, and not before."""
    swallowing = (
        "import sys\nprint('in', flush=True)\ntry:\n    sys.stdin.readline()\nexcept BaseException:\n    pass\n"
    )
    (tmp_path / "swallowing.py").write_text(swallowing)
    program = (
        "import sys, threading\nfrom fastdeploy_cache.launch.interrupts import interrupt_once\ninterrupt_once()\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\ntry:\n    import swallowing\n    threading.Event().wait(60)\n"
        "except KeyboardInterrupt:\n    print('interrupted')\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline() == "in\n"
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate("go on\n", timeout=_SECONDS)
    assert (process.returncode, said) == (0, "interrupted\n")
