"""Fixtures for all tests: nothing may be left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import time
from collections.abc import Callable, Generator, Iterator
from types import TracebackType

import hypothesis
import pytest

# How long an example takes says how busy the machine is, and nothing of what is tested.
hypothesis.settings.register_profile("no times", deadline=None)
hypothesis.settings.load_profile("no times")
pytest_plugins = ("tests.rigs.fast_door", "tests.rigs.skips")
pytest.register_assert_rewrite("tests.rigs")  # before anything of it is imported: its assertions show their values
# Whoever starts this in the background of a script has SIGINT ignored, and so would each process that a test starts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


_leave = subprocess.Popen.__exit__


def _leave_or_kill(
    self: subprocess.Popen[bytes],
    kind: type[BaseException] | None,
    error: BaseException | None,
    trace: TracebackType | None,
) -> None:
    """`with Popen(...)` waits for the end without a limit: where a test fails inside, the process is killed first."""
    if kind is not None:
        self.kill()
    _leave(self, kind, error, trace)


subprocess.Popen.__exit__ = _leave_or_kill  # type: ignore[method-assign]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is loaded here stays until the end: no look for garbage goes over it, neither meanwhile nor later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, descriptors or /dev/shm files; `leaks_allowed` names the exceptions."""
    from tests.rigs.leaks import child_pids, handles, new_shm_files, shm_files

    if "leaks_allowed" in request.keywords:
        yield
        return
    before = child_pids(), handles(), shm_files()
    yield
    deadline = time.monotonic() + 3
    while True:
        left = (
            child_pids() - before[0],
            {fd: name for fd, name in handles().items() if before[1].get(fd) != name},
            new_shm_files(before[2]),
        )
        if not any(left) or time.monotonic() > deadline:
            break
        gc.collect()  # not before: it takes longer than most tests
        time.sleep(0.05)  # a closed socket's descriptor goes in another thread
    for pid in left[0]:
        with contextlib.suppress(ProcessLookupError):  # what it started goes with it, or is a child of its own
            os.kill(pid, signal.SIGKILL)
    assert not any(left), f"left behind: processes {left[0]}, handles {left[1]}, /dev/shm {left[2]}"


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Look until a condition holds; for what no descriptor, event or futex tells."""

    def look(condition: Callable[[], object], timeout_seconds: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not condition():
            assert time.monotonic() < deadline, f"{condition} did not come to hold"
            time.sleep(0.01)

    return look
