"""The fast door: with `--fast`, tests that start processes are left out; in every run, none can start one unmarked."""

from __future__ import annotations

import sys
from collections.abc import Generator
from typing import Any

import pytest

STARTS = ("subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.system")
# What libraries ask of the system as they are first used, in whichever test: PaddlePaddle, PyTorch, matplotlib,
# NVIDIA's bindings and the standard library's `platform`.
OF_LIBRARIES = ("ldd --version", "'fc-list'", "cat /proc/cpuinfo", "/sbin/ldconfig", "'which'", "'uname'", "'file', ")


def pytest_addoption(parser: pytest.Parser) -> None:
    words = "leave out the tests marked `processes`"
    parser.addoption("--fast", action="store_true", help=words)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "processes: this test starts processes, or talks to some; --fast leaves it out")
    config.pluginmanager.register(FastDoor(leaves_out=config.getoption("--fast")))


class FastDoor:
    """Hears of every process that this one starts, in whichever thread; the interpreter tells it, not the tests."""

    def __init__(self, *, leaves_out: bool) -> None:
        self._leaves_out = leaves_out
        self._started: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in STARTS and not any(words in str(arguments) for words in OF_LIBRARIES):
            self._started.append(f"{event} {arguments}"[:300])

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if not self._leaves_out:
            return
        left_out = [item for item in items if item.get_closest_marker("processes")]
        items[:] = [item for item in items if not item.get_closest_marker("processes")]
        config.hook.pytest_deselected(items=left_out)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Generator[None, None, None]:
        yield
        started, self._started = self._started, []
        if started and not item.get_closest_marker("processes"):
            words = "it started a process: mark the test, its module or its parameter with `pytest.mark.processes`"
            pytest.fail(f"{words}; {started}", pytrace=False)
