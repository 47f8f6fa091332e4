"""The lanes of a process: each takes tasks from its queue, does one after the other and answers each."""

from __future__ import annotations

import logging
import os
import threading
from typing import NamedTuple, Protocol

from fastdeploy_cache.errors import QueueDisconnectedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage
from fastdeploy_cache.ipc.task_queue import RankQueue
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup
from fastdeploy_cache.transfer_manager.process.wire import (
    EXIT_ENGINE_GONE,
    DoneMessage,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    ToProcess,
)
from fastdeploy_cache.transfer_manager.process.words import RankSignal, RankState
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TransferTask

logger = logging.getLogger(__name__)


class Moved(NamedTuple):
    """What a task came to. `seconds`: of the part that counts, where that is not all of it."""

    num_bytes: int
    num_blocks: int = 0
    seconds: float | None = None
    counts: dict[str, int] | None = None


class Executor(Protocol):
    """Does the tasks of a process; one of each lane at a time."""

    report: bytes  # what the engine is told of it when it is ready; a message that its owner there understands

    @property
    def is_lost(self) -> bool:
        """It can do nothing any more: the process has to be replaced."""
        ...

    def bind_thread(self) -> None:
        """Called once by the thread of each lane."""
        ...

    def do(self, task: TransferTask) -> Moved:
        """One task; whatever it raises is that task's failure."""
        ...

    def close(self) -> None:
        """Give back what is held. Called after the last task."""
        ...


class LaneServer:
    """A thread for each lane works; the heartbeat has one of its own, so that a long task does not look like death.

    Each lane has its own connection, so that a task changes threads nowhere on its way.
    """

    def __init__(
        self, setup: ProcessSetup, signal_: RankSignal, executor: Executor, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._setup, self._signal, self._executor, self._now = setup, signal_, executor, clock.now

    def run(self) -> None:
        """Serve tasks until told to stop."""
        self._signal.state = RankState.READY
        out = threading.Thread(target=self._serve_lane, args=(Lane.OUT,), name="lane-out")
        out.start()
        self._serve_lane(Lane.IN)
        self._signal.state = RankState.STOPPING
        # The stop of one lane says nothing of the other: closed now, the executor would be taken away under a copy
        # that the lane OUT is still doing, or under tasks that stand in its queue before its own stop.
        out.join()
        self._executor.close()
        logger.info("event=stopped rank=%d", self._setup.rank)

    def _serve_lane(self, lane: Lane) -> None:
        setup, executor = self._setup, self._executor
        try:
            executor.bind_thread()
            queue = RankQueue(setup.queue_fds[lane])
            queue.put(encode(ReadyMessage(setup.incarnation, lane, executor.report)))
            logger.info("event=ready rank=%d incarnation=%d lane=%s", setup.rank, setup.incarnation, lane.name)
            while True:
                message: ToProcess = decode(queue.get(), ToProcess)
                if isinstance(message, StopMessage):
                    break
                self._signal.set_busy(lane, True)
                done = self.serve(message)
                # An answer would give the task's blocks out again, while what is lost (a stream, a library's thread)
                # may still write into them. Unanswered, they are free once this process has been reaped.
                if executor.is_lost:
                    raise SystemExit("what this process works on is lost to it; a new one begins afresh")
                # Before the answer: after it, whoever hears of the task's end could still find the lane busy with it.
                self._signal.set_busy(lane, False)
                queue.put(encode(done))
            queue.close()
        except QueueDisconnectedError:
            os._exit(EXIT_ENGINE_GONE)
        except BaseException as error:
            logger.exception("event=lane_failed lane=%s", lane.name)
            # Not only this thread: with one lane gone the heart would go on beating, and the engine would wait for
            # answers that nobody gives. It sees the death of a process, and starts a new one.
            os._exit(EXIT_SHORT if is_shortage(error) else 1)

    def serve(self, message: TaskMessage) -> DoneMessage:
        """Do a task, unless nobody wants it any more, and tell what it came to."""
        task, started = message.task, self._now()
        moved, error = Moved(0), self._refusal(message, started)
        was_tried = error is None
        if was_tried:
            try:
                moved = self._executor.do(task)
            except Exception as failure:  # the task boundary: any failure is this task's, never the process's
                logger.exception("event=task_failed task_id=%d", task.task_id)
                error = f"{type(failure).__name__}: {failure}"
        # A worker may sleep on this load's next layer: only this word wakes it before its own deadline.
        if error is not None and task.kind.shows_layers:
            self._signal.set_failed(task.task_id)
        seconds = self._now() - started if moved.seconds is None else moved.seconds
        logger.debug("event=task task_id=%d %s seconds=%.6f error=%s", task.task_id, moved, seconds, error)
        result = RankResult(
            rank=self._setup.rank,
            num_bytes=moved.num_bytes,
            num_blocks=moved.num_blocks,
            seconds=seconds,
            error=error,
            was_tried=was_tried,
            counts=moved.counts,
        )
        return DoneMessage(task.task_id, message.incarnation, result)

    def _refusal(self, message: TaskMessage, now: float) -> str | None:
        task = message.task
        if message.incarnation != self._setup.incarnation:
            return f"task is for incarnation {message.incarnation}, this is {self._setup.incarnation}"
        # The engine may cancel while this is read. Either the word is seen here, or the task is done for nobody: it is
        # never half done, as a task that has begun is not looked at again.
        if self._signal.is_cancelled(task.task_id):
            return "cancelled before the rank began"
        return "deadline passed before the rank began" if now > task.deadline else None
