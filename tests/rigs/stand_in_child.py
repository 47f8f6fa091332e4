"""Threads in the place of a rank's processes: the real lanes and executors, on a clock that the test moves."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from fastdeploy_cache.errors import QueueDisconnectedError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.task_queue import RankQueue
from fastdeploy_cache.transfer_manager.process.lane_task import Executor
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer
from fastdeploy_cache.transfer_manager.process.wire import ReadyMessage, StopMessage, ToProcess
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.rank.setup import RankSetup
from fastdeploy_cache.transfer_manager.rank.worker import CopyExecutor
from fastdeploy_cache.transfer_manager.storage.setup import StorageSetup
from fastdeploy_cache.transfer_manager.storage.worker import StorageExecutor
from fastdeploy_cache.transfer_manager.task import Lane
from tests.rigs.manual_clock import ManualClock

_KILLED = -9


class StandIn:
    """See `process.supervisor.Process`. Killed, it does nothing more; what it was doing is not answered."""

    def __init__(self, children: StandIns, setup: Any, fds: dict[int, int]) -> None:
        self._children, self._setup = children, setup
        self.pid, self.pidfd = next(children.pids), os.eventfd(0, os.EFD_CLOEXEC)
        self._code: int | None = None
        self._ending = threading.Lock()
        self._num_lanes = len(Lane)
        signal = RankSignal(SharedArray(fds[setup.signal_fd], RankSignal.NUM_BYTES))
        self._signal = signal
        self._executor = children.executor(setup, signal, fds)
        self._server = LaneServer(setup, signal, self._executor, children.clock)
        self._threads = [
            threading.Thread(target=self._serve, args=(lane, fds[setup.queue_fds[lane]]), daemon=True) for lane in Lane
        ]
        self._beat()
        for thread in self._threads:
            thread.start()

    def is_before(self, setup: Any) -> bool:
        """Whether the other is of the same rank, and of the same kind."""
        return type(setup) is type(self._setup) and setup.rank == self._setup.rank

    def _beat(self) -> None:
        """Move the heart's word, and again a moment later, while it lives."""
        if self._code is None:
            if not self._children.are_stopped:
                self._signal.beat()
            clock = self._children.clock
            clock.call_at(clock.now() + self._setup.heartbeat_seconds, self._beat)

    def _serve(self, lane: Lane, fd: int) -> None:
        queue = RankQueue(fd)
        with contextlib.suppress(QueueDisconnectedError):
            queue.put(encode(ReadyMessage(self._setup.incarnation, lane, self._executor.report)))
            while True:
                message: ToProcess = decode(queue.get(), ToProcess)
                if isinstance(message, StopMessage):
                    break
                self._children.pass_gate(self)
                if self._code is not None:
                    break
                work = self._server.begin(message)
                while (done := work.step()) is None:
                    pass
                if self._code is None:
                    queue.put(encode(done))
        queue.close()
        with self._ending:
            self._num_lanes -= 1
            is_last = self._num_lanes == 0
        if is_last:
            self._executor.close()
            self._end(0)

    def _end(self, code: int) -> None:
        with self._ending:
            if self._code is None:
                self._code = code
                os.eventfd_write(self.pidfd, 1)

    def kill(self) -> None:
        self._end(_KILLED)
        self._children.look_again()

    def reap(self) -> int | None:
        with self._ending:  # or who reaps would close the descriptor under the one that is about to say so there
            return self._code

    def log_tail(self) -> str:
        return ""

    def close(self) -> None:
        os.close(self.pidfd)

    def join(self) -> None:
        """Wait for its threads, and keep nothing that a process's end would have given back: its queue is closed."""
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive()
        vars(self).pop("_executor", None)
        vars(self).pop("_server", None)
        self._signal.array.close()
        self._threads.clear()


class StandIns:
    """All of a test.

    Attributes:
        are_stopped: their hearts do not beat, as those of processes that got SIGSTOP.
    """

    def __init__(self, clock: ManualClock) -> None:
        self.clock, self.pids, self.are_stopped = clock, itertools.count(1), False
        self.made: list[StandIn] = []
        self._gate, self._is_held = threading.Condition(), False

    def new(self, setup: Any, config: Any, fds: tuple[int, ...], program: str = "") -> StandIn:
        """In the place of `ChildProcess`."""
        del fds  # those of KV arrays are opened by name
        for before in self.made:  # a process that was reaped holds no lock on a store any more
            if before.is_before(setup):
                before.join()
        child = StandIn(self, setup, {fd: os.dup(fd) for fd in (*setup.queue_fds, setup.cpu_fd, setup.signal_fd)})
        self.made.append(child)
        return child

    def executor(self, setup: Any, signal: RankSignal, fds: dict[int, int]) -> Executor:
        """What the real process would have."""
        if isinstance(setup, StorageSetup):
            return StorageExecutor(msgspec.structs.replace(setup, cpu_fd=fds[setup.cpu_fd]))
        assert isinstance(setup, RankSetup)
        return CopyExecutor(msgspec.structs.replace(setup, cpu_fd=fds[setup.cpu_fd]), signal)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """No task is begun meanwhile."""
        self._is_held = True
        try:
            yield
        finally:
            with self._gate:
                self._is_held = False
                self._gate.notify_all()

    def pass_gate(self, child: StandIn) -> None:
        """Called before each task."""
        with self._gate:
            assert self._gate.wait_for(lambda: not self._is_held or child.reap() is not None, 60)

    def look_again(self) -> None:
        """One was killed, which waits no more."""
        with self._gate:
            self._gate.notify_all()

    def wait_for_deaths(self, num_dead: int) -> None:
        """Return once so many have been killed."""
        with self._gate:
            assert self._gate.wait_for(lambda: sum(child.reap() == _KILLED for child in self.made) >= num_dead, 60)

    def join(self) -> None:
        """All have ended."""
        for child in self.made:
            child.join()
        self.made.clear()
