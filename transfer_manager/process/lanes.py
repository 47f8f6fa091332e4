"""The lanes of a process: each takes tasks from its queue, does them and answers each."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque

from fastdeploy_cache.errors import QueueDisconnectedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.shortage import EXIT_SHORT, is_shortage
from fastdeploy_cache.ipc.task_queue import RankQueue
from fastdeploy_cache.transfer_manager.process.lane_task import Executor, LaneTask
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup
from fastdeploy_cache.transfer_manager.process.wire import (
    EXIT_ENGINE_GONE,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    ToProcess,
)
from fastdeploy_cache.transfer_manager.process.words import RankSignal, RankState
from fastdeploy_cache.transfer_manager.task import Lane

logger = logging.getLogger(__name__)


class LaneServer:
    """A thread for each lane works; the heartbeat has one of its own, so that a long task does not look like death.

    Each lane has its own connection, so that a task changes threads nowhere on its way.
    """

    def __init__(
        self, setup: ProcessSetup, signal_: RankSignal, executor: Executor, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._setup, self._signal, self._executor, self._clock = setup, signal_, executor, clock

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
            self._serve_tasks(lane, queue)
            queue.close()
        except QueueDisconnectedError:
            os._exit(EXIT_ENGINE_GONE)
        except BaseException as error:
            logger.exception("event=lane_failed lane=%s", lane.name)
            # Not only this thread: with one lane gone the heart would go on beating, and the engine would wait for
            # answers that nobody gives. It sees the death of a process, and starts a new one.
            os._exit(EXIT_SHORT if is_shortage(error) else 1)

    def _serve_tasks(self, lane: Lane, queue: RankQueue) -> None:
        """Serve until the engine says stop and what came before has ended. Between two steps of a task that goes in
        steps one other is taken: that one waits for a step at most, and the next step for that one. Tasks that go in
        steps are done in order: side by side, all would end when the last does."""
        in_steps, is_open = deque[LaneTask](), True
        while in_steps or is_open:
            data = (queue.get_now() if in_steps else queue.get()) if is_open else None
            if data is not None:
                message: ToProcess = decode(data, ToProcess)
                if isinstance(message, StopMessage):
                    is_open = False
                elif message.task.units:
                    in_steps.append(self.begin(message))
                else:
                    self._step(lane, queue, self.begin(message), is_alone=not in_steps)
            if in_steps and self._step(lane, queue, in_steps[0], is_alone=len(in_steps) == 1):
                in_steps.popleft()

    def _step(self, lane: Lane, queue: RankQueue, task: LaneTask, *, is_alone: bool = True) -> bool:
        """Do a step; whether the task has ended. Not `is_alone`: others are there that go in steps."""
        self._signal.set_busy(lane, task.task.task_id)
        done = task.step()
        # An answer would give the task's blocks out again, while what is lost (a stream, a library's thread) may still
        # write into them. Unanswered, they are free once this process has been reaped.
        if self._executor.is_lost:
            raise SystemExit("what this process works on is lost to it; a new one begins afresh")
        if done is None:
            return False
        # Before the answer: after it, whoever hears of the task's end could still find the lane busy with it.
        if is_alone:
            self._signal.set_busy(lane, None)
        queue.put(encode(done))
        return True

    def begin(self, message: TaskMessage) -> LaneTask:
        """A task, of which nothing is done yet."""
        return LaneTask(message, self._setup, self._signal, self._executor, self._clock)
