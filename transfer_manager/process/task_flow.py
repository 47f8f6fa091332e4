"""Tasks on their way through the I/O thread: accepted, queued, in flight, ended."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence

from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks
from fastdeploy_cache.transfer_manager.process.flights import Flight, Flights, failed
from fastdeploy_cache.transfer_manager.process.words import NUM_SLOTS, RankSignal
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TaskKind, TransferResult, TransferTask


class TaskFlow:
    """Any thread accepts tasks; all the rest is done by the I/O thread.

    `lock` guards `is_open`, the counts and the queue between the threads, and every setting of `all_ready`. No
    callback runs under it.
    """

    def __init__(
        self, signals: Sequence[RankSignal], callbacks: Callbacks, max_tasks: int, in_order: bool, clock: Clock
    ) -> None:
        self._signals, self._callbacks, self._max_tasks = signals, callbacks, max_tasks
        self.lock, self._now = threading.Lock(), clock.now
        self.is_open = True
        self.all_ready = clock.event()
        self.flights = Flights(in_order=in_order)
        self._num_tasks = [0 for _ in Lane]
        self._queue: deque[TransferTask] = deque()
        self._busy_slots: set[int] = set()  # progress words of loads in flight

    # -- any thread

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        """Whether so many tasks of this kind, accepted now, would be sent."""
        may_begin = self.all_ready.is_set() or not kind.needs_all_ranks
        return self.is_open and may_begin and self._num_tasks[kind.lane] + num_tasks <= self._max_tasks

    def accept(self, task: TransferTask) -> bool:
        """Queue a task for the I/O thread, or take nothing of it.

        Asked and taken under one lock. Between the two, another thread could take the last place, or the I/O thread
        could close and leave: the task would then lie in a queue that nobody empties, and never be answered.
        """
        with self.lock:
            if not self.has_room(task.kind) or not self._take_slot(task):
                return False
            self._num_tasks[task.kind.lane] += 1
            self._queue.append(task)
            return True

    def _take_slot(self, task: TransferTask) -> bool:
        """The progress word of a task that shows its layers, unless one that shares it is in flight.

        Written before any rank hears of the task: a waiter that comes first would else find the word of the task
        before, and take a load that has not begun for one that has ended.
        """
        if task.kind.shows_layers:
            slot = task.task_id % NUM_SLOTS
            if slot in self._busy_slots:
                return False
            self._busy_slots.add(slot)
            for signal in self._signals:
                signal.set_begun(task.task_id)
        return True

    # -- the I/O thread

    def take_queued(self) -> Iterator[TransferTask]:
        """What was accepted, until there is nothing left. The lock is not held while a task is sent."""
        while True:
            with self.lock:
                if not self._queue:
                    return
                task = self._queue.popleft()
            yield task

    def refuse(self, task: TransferTask, error: str) -> None:
        """End a task that was accepted and that no rank has got, so that none will ever write its progress."""
        if task.kind.shows_layers:
            for signal in self._signals:
                signal.set_failed(task.task_id)
        self._finish(failed(task, len(self._signals), error))

    def answer(self, flight: Flight, answer: RankResult) -> None:
        """Note one rank's answer; with the last one the task ends."""
        result = self.flights.answer(flight, answer, self._now())
        if result is not None:
            self._finish(result)
        elif answer.error is not None and sum(each.error is not None for each in flight.results) == 1:
            self._callbacks.call(lambda: self._callbacks.on_failing(flight.task))

    def fail(self, flight: Flight, rank: int, error: str, *, was_tried: bool = False) -> None:
        """Answer for a rank that has been reaped or never got the task.

        Only then is its progress word the engine's to write: a rank that still runs could write a layer behind the
        failure, and a worker would compute with what has not come.
        """
        if flight.task.kind.shows_layers:
            self._signals[rank].set_failed(flight.task.task_id)
        self.answer(flight, RankResult(rank=rank, error=error, was_tried=was_tried))

    def cancel_unbegun(self) -> None:
        """Ask ranks to leave out what they have not begun, but for tasks whose effect outlives the engine."""
        for flight in self.flights.all():
            if not flight.task.kind.outlives_engine:
                for rank in flight.waiting:
                    self._signals[rank].cancel(flight.task.task_id)

    def _finish(self, result: TransferResult) -> None:
        """Give the task's place and word back before its end is told: who hears of it may submit the next at once."""
        with self.lock:
            self._num_tasks[result.task.kind.lane] -= 1
            if result.task.kind.shows_layers:
                self._busy_slots.discard(result.task.task_id % NUM_SLOTS)
        self._callbacks.call(lambda: self._callbacks.on_result(result))
