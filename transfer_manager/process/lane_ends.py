"""The process's ends of its lanes, for one thread that waits for other things, too."""

from __future__ import annotations

from collections.abc import Iterator

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.poller import Poller
from fastdeploy_cache.ipc.task_queue import RankQueue
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup
from fastdeploy_cache.transfer_manager.process.wire import (
    DoneMessage,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    ToProcess,
)
from fastdeploy_cache.transfer_manager.process.words import RankSignal, RankState
from fastdeploy_cache.transfer_manager.task import Lane, RankResult


class LaneEnds:
    """All lanes of one process. One thread. Its verbs raise `QueueDisconnectedError` where the engine has gone."""

    def __init__(self, setup: ProcessSetup, signal: RankSignal) -> None:
        self._setup, self._signal = setup, signal
        self._queues: dict[Lane, RankQueue] = {}
        self._stopped: set[Lane] = set()

    def open(self, poller: Poller) -> None:
        """Have the poller watch each, and tell the engine that it is ready."""
        self._signal.state = RankState.READY
        for lane in Lane:
            self._queues[lane] = RankQueue(self._setup.queue_fds[lane])
            poller.register(self._queues[lane].fd, lane)
            self._queues[lane].put(encode(ReadyMessage(self._setup.incarnation, lane)))

    def take(self) -> Iterator[tuple[Lane, TaskMessage]]:
        """The tasks that have come."""
        for lane, queue in self._queues.items():
            while (data := queue.get_now()) is not None:
                message: ToProcess = decode(data, ToProcess)
                if isinstance(message, StopMessage):
                    self._stopped.add(lane)
                    self._signal.state = RankState.STOPPING
                else:
                    yield lane, message

    @property
    def are_stopped(self) -> bool:
        """Whether every lane has been told to stop.

        At the first of them the engine may not have written the other's yet: with this process gone, it would find
        that lane disconnected, and take an end in order for a failure.
        """
        return len(self._stopped) == len(Lane)

    def reply(self, lane: Lane, task_id: int, result: RankResult) -> None:
        """Answer a task."""
        self._queues[lane].put(encode(DoneMessage(task_id, self._setup.incarnation, result)))
