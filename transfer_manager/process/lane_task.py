"""A task that a lane has begun: done at once, or step by step with other tasks in between."""

from __future__ import annotations

import logging
from collections.abc import Generator
from typing import NamedTuple, Protocol

from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup
from fastdeploy_cache.transfer_manager.process.wire import DoneMessage, TaskMessage
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.task import RankResult, StoreNews, TransferTask

logger = logging.getLogger(__name__)


class Moved(NamedTuple):
    """What a task came to. `seconds`: of the part that counts, where that is not all of it."""

    num_bytes: int
    num_blocks: int = 0
    seconds: float | None = None
    counts: dict[str, int] | None = None
    news: StoreNews | None = None


Steps = Generator[None, None, Moved]


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

    def do(self, task: TransferTask) -> Moved | Steps:
        """One task, or the steps of one that yields between two of them, when it may be left; whatever it raises is
        that task's failure."""
        ...

    def close(self) -> None:
        """Give back what is held. Called after the last task."""
        ...


class LaneTask:
    """One task of a lane. The lane's thread only."""

    def __init__(
        self, message: TaskMessage, setup: ProcessSetup, signal: RankSignal, executor: Executor, clock: Clock
    ) -> None:
        self.task = message.task
        self._incarnation, self._setup, self._signal = message.incarnation, setup, signal
        self._executor, self._now = executor, clock.now
        self._steps: Steps | None = None
        self._seconds = 0.0  # in its own steps

    def step(self) -> DoneMessage | None:
        """Do the next step, unless nobody wants the task any more; the answer when it has ended."""
        started = self._now()
        refusal = self._refusal(started)
        if refusal is not None:
            # One that has begun and is late was too slow: that says something of the rank. A cancelled one does not.
            is_tried = self._steps is not None and not self._is_cancelled
            return self._ended(Moved(0), refusal, was_tried=is_tried)
        moved, error = self._advance()
        self._seconds += self._now() - started
        return self._ended(moved, error) if moved is not None else None

    def _advance(self) -> tuple[Moved | None, str | None]:
        """What the task has come to, or None where steps are left; and what has failed."""
        try:
            if self._steps is None:
                done = self._executor.do(self.task)
                if isinstance(done, Moved):
                    return done, None
                self._steps = done
            next(self._steps)
        except StopIteration as end:
            return end.value, None
        except Exception as failure:  # the task boundary: any failure is this task's, never the process's
            logger.exception("event=task_failed task_id=%d", self.task.task_id)
            return Moved(0), f"{type(failure).__name__}: {failure}"
        return None, None

    def _ended(self, moved: Moved, error: str | None = None, *, was_tried: bool = True) -> DoneMessage:
        task = self.task
        if self._steps is not None:
            self._steps.close()
        # A worker may sleep on this load's next layer: only this word wakes it before its own deadline.
        if error is not None and task.kind.shows_layers:
            self._signal.set_failed(task.task_id)
        seconds = self._seconds if moved.seconds is None else moved.seconds
        logger.debug("event=task task_id=%d %s seconds=%.6f error=%s", task.task_id, moved, seconds, error)
        result = RankResult(
            rank=self._setup.rank,
            num_bytes=moved.num_bytes,
            num_blocks=moved.num_blocks,
            seconds=seconds,
            error=error,
            was_tried=was_tried,
            counts=moved.counts,
            news=moved.news,
        )
        return DoneMessage(task.task_id, self._incarnation, result)

    @property
    def _is_cancelled(self) -> bool:
        return self._signal.is_cancelled(self.task.task_id)

    def _refusal(self, now: float) -> str | None:
        when = "before the rank began" if self._steps is None else "while the rank was at it"
        if self._incarnation != self._setup.incarnation:
            return f"task is for incarnation {self._incarnation}, this is {self._setup.incarnation}"
        # The engine may cancel while this is read. Either the word is seen here, or the step is done for nobody: it is
        # never half done, as a step that has begun is not looked at again.
        if self._is_cancelled:
            return f"cancelled {when}"
        return f"deadline passed {when}" if now > self.task.deadline else None
