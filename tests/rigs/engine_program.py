"""An engine process for `test_engine_death`: says its ranks' pids on standard output, then does what its mode says."""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import threading
from pathlib import Path

from fastdeploy_cache import PrefixCacheManager
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.rank import owner as rank_owner
from fastdeploy_cache.transfer_manager.rank.setup import RankSetup
from tests.rigs.faulty_engine import Engine, new_config

TP_SIZE = 2


def say_pids(pids: list[int | None]) -> None:
    print(*pids, flush=True)


def run(busy: bool) -> None:
    """Serve for ever, or wait; SIGTERM leaves through the context manager."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
    with PrefixCacheManager(new_config(TP_SIZE, num_gpu=16, num_cpu=64)) as cache:
        engine = Engine(cache, TP_SIZE)
        engine.serve(list(range(30)))
        say_pids([status.pid for status in cache.stats().ranks])
        number = 0
        while busy:
            number += 1
            engine.serve([number % 7] * 40)
        threading.Event().wait()


class DeadlySpawn(ChildProcess):
    """With the last rank's first breath the engine is killed: no rank has set anything up."""

    pids: list[int | None] = []  # noqa: RUF012 (one process, one list)

    def __init__(self, setup: RankSetup, *rest: object) -> None:
        super().__init__(setup, *rest)  # type: ignore[arg-type]
        self.pids.append(self.pid)
        if len(self.pids) == TP_SIZE:
            say_pids(self.pids)
            os.kill(os.getpid(), signal.SIGKILL)


class DeadlyStop(DeadlySpawn):
    """The engine is killed when every rank has been stopped before its interpreter ran a line of ours."""

    def __init__(self, setup: RankSetup, *rest: object) -> None:
        ChildProcess.__init__(self, setup, *rest)  # type: ignore[arg-type]
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WNOWAIT)
        self.pids.append(self.pid)
        if len(self.pids) == TP_SIZE:
            say_pids(self.pids)
            os.kill(os.getpid(), signal.SIGKILL)


def interpreter_that_stops() -> str:
    """A program in the interpreter's place that stops itself as its first act."""
    path = Path(tempfile.mkdtemp()) / "python"
    path.write_text("#!/bin/sh\nkill -STOP $$\n")
    path.chmod(0o700)
    return str(path)


if __name__ == "__main__":
    if sys.argv[1] == "dies-in-start":
        rank_owner.ChildProcess = DeadlySpawn  # type: ignore[misc]
    if sys.argv[1] == "stopped-in-start":
        rank_owner.ChildProcess = DeadlyStop  # type: ignore[misc]
        sys.executable = interpreter_that_stops()
    run(busy=sys.argv[1] == "busy")
