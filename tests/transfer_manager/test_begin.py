"""How a process begins, and what it ends with where it lacks descriptors, threads or memory for that."""

from __future__ import annotations

import errno
import logging
import os
import sys
import tempfile
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fastdeploy_cache.errors import PeerRefusedError
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process import child, lanes
from fastdeploy_cache.transfer_manager.process.begin import begin
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer
from fastdeploy_cache.transfer_manager.task import Lane
from tests.rigs.descriptors import descriptors_left


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], int]], int]:
    """Begins a process of rank 7 with this `main`."""

    def begin_with(main: Callable[[], int]) -> int:
        worker = ModuleType("worker_of_a_test")
        worker.main = main  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, worker.__name__, worker)
        return begin(worker.__name__)

    monkeypatch.setattr(sys, "argv", ["worker", "--rank", "7", "--incarnation", "1"])
    return begin_with


def raising(error: BaseException) -> Callable[[], int]:
    def main() -> int:
        raise error

    return main


def test_the_status_is_the_workers(run: Callable[[Callable[[], int]], int]) -> None:
    """And what is no shortage is raised, with its traceback for the log."""
    assert run(lambda: 3) == 3
    with pytest.raises(OSError, match="denied"):
        run(raising(OSError(errno.EACCES, "denied")))


@pytest.mark.parametrize("is_wrapped", [False, True])
def test_a_shortage_is_said_in_one_line(
    run: Callable[[Callable[[], int]], int], caplog: pytest.LogCaptureFixture, is_wrapped: bool
) -> None:
    """It has a status of its own, also where an error of ours is raised from it, and the line names the limit."""
    error: Exception = OSError(errno.EMFILE, "Too many\nopen files")
    if is_wrapped:
        error, error.__cause__ = PeerRefusedError(str(error)), error
    with caplog.at_level(logging.ERROR):
        assert run(raising(error)) == EXIT_SHORT
    (line,) = (record.getMessage() for record in caplog.records)
    assert line.startswith(f"event=cannot_start rank=7 reason={type(error).__name__}: [Errno 24] Too many open files; ")
    assert "RLIMIT_NOFILE" in line and "\n" not in line


def test_a_log_for_which_there_is_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first process of all has `tempfile` look for a folder. That says that there is none, and we say why."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with descriptors_left(0), pytest.raises(OSError) as caught:
        child._open_log(TransferConfig(), 0, "any")
    assert is_shortage(caught.value)


@pytest.mark.parametrize(("number", "status"), [(errno.ENOMEM, EXIT_SHORT), (errno.EIO, 1)])
def test_a_lane_that_cannot_begin(monkeypatch: pytest.MonkeyPatch, number: int, status: int) -> None:
    """Its thread is the process's end; a shortage is told apart there, too."""

    def bind_thread() -> None:
        raise OSError(number, os.strerror(number))

    ended = list[int]()
    monkeypatch.setattr(lanes.os, "_exit", ended.append)
    executor: Any = SimpleNamespace(bind_thread=bind_thread)
    LaneServer(SimpleNamespace(), SimpleNamespace(), executor)._serve_lane(Lane.IN)  # type: ignore[arg-type]
    assert ended == [status]
