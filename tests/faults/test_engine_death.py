"""However an engine ends, its ranks end with it, and nothing with a name stays behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.rigs.leaks import new_shm_files, shm_files
from tests.rigs.process_ends import SECONDS, wait_exit, watched
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

GONE_WITHIN_SECONDS = 3.0  # the promise


class EngineProcess:
    """An `engine_program` in a process of its own, with descriptors on its ranks."""

    def __init__(self, mode: str, temporary: Path, stack: ExitStack) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.rigs.engine_program", mode],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"TMPDIR": str(temporary)},
        )
        assert self.process.stdout is not None
        self.pids = [int(pid) for pid in self.process.stdout.readline().split()]
        self.pidfds: list[int] = []
        stack.callback(self.reap)
        for pid in self.pids:
            try:
                self.pidfds.append(stack.enter_context(watched(pid)))
            except ProcessLookupError:  # dead and reaped already
                assert mode == "dies-in-start"
        stack.callback(self.kill_ranks)

    def ranks_end(self) -> bool:
        return all(wait_exit(pidfd, GONE_WITHIN_SECONDS) for pidfd in self.pidfds)

    def reap(self) -> None:
        self.process.kill()
        self.process.communicate(timeout=SECONDS)

    def kill_ranks(self) -> None:
        """For a test that failed: no process of ours may stay, stopped ones neither."""
        for pidfd in self.pidfds:
            if not wait_exit(pidfd, 0):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)


@pytest.fixture
def temporary() -> Iterator[Path]:
    """A short temporary folder that only the engine and its ranks use."""
    with tempfile.TemporaryDirectory(prefix="ted-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start(temporary: Path) -> Iterator[Callable[[str], EngineProcess]]:
    """Starts an engine; nothing of it outlives the test."""
    with ExitStack() as stack:
        yield lambda mode: EngineProcess(mode, temporary, stack)


@pytest.mark.parametrize("mode", ["idle", "busy"])
def test_kill_9_of_the_engine_ends_its_ranks(start: Callable[[str], EngineProcess], temporary: Path, mode: str) -> None:
    """Idle or in the middle of copies: ranks end within seconds, and neither /dev/shm nor the folder has ours."""
    before = shm_files()
    engine = start(mode)
    assert len(engine.pids) == 2
    engine.process.kill()
    assert engine.ranks_end()
    assert not new_shm_files(before) and list(temporary.iterdir()) == []


def test_kill_9_of_the_engine_ends_a_stopped_rank(start: Callable[[str], EngineProcess], temporary: Path) -> None:
    """A rank that cannot run a single instruction is ended by the kernel."""
    engine = start("idle")
    stopped(engine.pids[0])
    engine.process.kill()
    assert engine.ranks_end()
    assert list(temporary.iterdir()) == []


def test_kill_9_in_the_middle_of_the_start(start: Callable[[str], EngineProcess]) -> None:
    """Ranks that had not asked the kernel for anything yet find their engine gone and end."""
    engine = start("dies-in-start")
    assert len(engine.pids) == 2 and engine.process.wait(SECONDS) == -signal.SIGKILL
    assert engine.ranks_end()


def test_a_rank_that_is_stopped_before_its_first_line_ends_with_the_engine(
    start: Callable[[str], EngineProcess],
) -> None:
    """It has run no line of ours that could have asked the kernel for anything; it would hold the CPU tier for ever."""
    engine = start("stopped-in-start")
    assert len(engine.pids) == 2 and engine.process.wait(SECONDS) == -signal.SIGKILL
    assert engine.ranks_end()


def test_a_rank_leads_a_session_of_its_own(start: Callable[[str], EngineProcess]) -> None:
    """A signal to a rank's process group, as engines send that end what they have launched, reaches the rank alone."""
    engine = start("idle")
    assert [os.getsid(pid) for pid in engine.pids] == [os.getpgid(pid) for pid in engine.pids] == engine.pids
    os.killpg(os.getpgid(engine.pids[0]), signal.SIGTERM)
    assert wait_exit(engine.pidfds[0], GONE_WITHIN_SECONDS) and not wait_exit(engine.pidfds[1], 0)
    assert engine.process.poll() is None


@pytest.mark.parametrize("stop_one", [False, True])
def test_sigterm_leaves_through_the_context_manager(
    start: Callable[[str], EngineProcess], temporary: Path, stop_one: bool
) -> None:
    """An engine whose handler raises SystemExit ends its ranks, a stopped one too, and exits with its own code."""
    engine = start("idle")
    if stop_one:
        stopped(engine.pids[1])
    engine.process.terminate()
    assert engine.process.wait(SECONDS) == 7
    assert engine.ranks_end()
    assert list(temporary.iterdir()) == []


def test_an_engine_that_never_closes_ends_its_ranks(temporary: Path) -> None:
    """A program that forgets `close` and comes to its end leaves no ranks."""
    code = (
        "from fastdeploy_cache import PrefixCacheManager\n"
        "from tests.rigs.faulty_engine import new_config\n"
        "cache = PrefixCacheManager(new_config(2, 8, 16))\n"
        "print(*[status.pid for status in cache.stats().ranks], flush=True)\n"
        "input()\n"
    )
    command, env = [sys.executable, "-c", code], os.environ | {"TMPDIR": str(temporary)}
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        )
        assert process.stdout is not None
        pidfds = [stack.enter_context(watched(int(pid))) for pid in process.stdout.readline().split()]
        process.communicate("\n", timeout=SECONDS)
        assert len(pidfds) == 2 and process.returncode == 0
        assert all(wait_exit(pidfd, GONE_WITHIN_SECONDS) for pidfd in pidfds)
        assert list(temporary.iterdir()) == []
