"""A lane and a task that goes in steps: what is taken in between, and how it ends."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.task_queue import RankQueue, TaskQueue
from fastdeploy_cache.transfer_manager.process.flights import Flights
from fastdeploy_cache.transfer_manager.process.lane_task import Moved, Steps
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer
from fastdeploy_cache.transfer_manager.process.setup import ProcessSetup
from fastdeploy_cache.transfer_manager.process.wire import FromProcess, StopMessage, TaskMessage
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, TaskKind, TransferTask

NOTHING = np.array([], np.int32)
NUM_STEPS = 4


class StepClock:
    """Time that only the executor moves."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time


class StepExecutor:
    """Each step takes a second; `during` is called in each, with the task and the number of the step."""

    report, is_lost = b"", False

    def __init__(self, clock: StepClock, signal: RankSignal) -> None:
        self._clock, self._signal = clock, signal
        self.done: list[tuple[int, int]] = []
        self.during: Callable[[int, int], None] = lambda _, __: None
        self.num_left = 0  # steps that were given up

    def bind_thread(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""

    def do(self, task: TransferTask) -> Moved | Steps:
        if task.units:
            return self._steps(task.task_id)
        self._step(task.task_id, 0)
        return Moved(1)

    def _steps(self, task_id: int) -> Steps:
        try:
            for number in range(NUM_STEPS):
                self._step(task_id, number)
                if number < NUM_STEPS - 1:
                    yield
        except GeneratorExit:
            self.num_left += 1
            raise
        return Moved(NUM_STEPS)

    def _step(self, task_id: int, number: int) -> None:
        assert self._signal.is_at(Lane.IN, task_id), "the word says which task it is at"
        self.done.append((task_id, number))
        self._clock.time += 1.0
        self.during(task_id, number)


class Rig:
    """A lane in a thread of its own, on a queue to which this side writes."""

    def __init__(self) -> None:
        self.signal, self.clock = RankSignal.create("lane"), StepClock()
        self.executor = StepExecutor(self.clock, self.signal)
        setup = ProcessSetup(rank=0, incarnation=1, engine_pid=0, queue_fds=(), signal_fd=-1, heartbeat_seconds=1.0)
        self._server: Any = LaneServer(setup, self.signal, self.executor, self.clock)  # type: ignore[arg-type]
        self.queue = TaskQueue(1, 64)

    def put(self, task_id: int, *, is_image: bool = False, deadline: float = 1000.0) -> None:
        units = (NOTHING,) if is_image else ()
        task = TransferTask(
            task_id=task_id, kind=TaskKind.SWAP_IN, source_ids=NOTHING, destination_ids=NOTHING, deadline=deadline,
            units=units,
        )  # fmt: skip
        self.signal.set_begun(task_id)
        self.queue.put(encode(TaskMessage(1, task)))

    def run(self) -> list[RankResult]:
        """Let the lane do what was put, and what is put meanwhile, up to the stop; its answers in their order."""
        far = RankQueue(os.dup(self.queue.rank_fds[0]))
        thread = threading.Thread(target=self._server._serve_tasks, args=(Lane.IN, far))
        thread.start()
        self.queue.put(encode(StopMessage()))
        thread.join(30)
        assert not thread.is_alive()
        far.close()
        answers = []
        while (data := self.queue.get()) is not None:
            message: Any = decode(data, FromProcess)
            answers.append((message.task_id, message.result))
        self.ids = [task_id for task_id, _ in answers]
        return [result for _, result in answers]


@pytest.fixture
def rig() -> Iterator[Rig]:
    """Closed at the end."""
    made = Rig()
    yield made
    made.queue.close()
    made.signal.array.close()
    made.__dict__.clear()  # pytest still holds it when the leak fixture looks


def test_one_other_task_is_taken_between_two_steps(rig: Rig) -> None:
    """Small ones and the image's steps take turns: none waits for more than one step, and the image goes on."""
    rig.put(1, is_image=True)
    for task_id in (2, 3, 4, 5, 6, 7):
        rig.put(task_id)
    answers = rig.run()
    assert rig.executor.done == [(1, 0), (2, 0), (1, 1), (3, 0), (1, 2), (4, 0), (1, 3), (5, 0), (6, 0), (7, 0)]
    assert rig.ids == [2, 3, 4, 1, 5, 6, 7] and all(answer.error is None for answer in answers)
    assert [answer.seconds for answer in answers] == [1, 1, 1, 4, 1, 1, 1], "each counts its own steps"
    assert rig.signal.num_busy_lanes == 0


def test_images_are_done_in_order(rig: Rig) -> None:
    """A second one waits for the first, and what is small for neither; the stop waits for both."""
    rig.put(1, is_image=True)
    rig.put(2, is_image=True)
    rig.put(3)
    rig.run()
    assert [task_id for task_id, _ in rig.executor.done] == [1, 1, 3, 1, 1, 2, 2, 2, 2] and rig.ids == [3, 1, 2]


def test_a_cancelled_image_ends_at_its_next_step(rig: Rig) -> None:
    """It is answered as not tried, its word says that it has failed, and what it held is given up."""

    def cancel(_: int, number: int) -> None:
        if number == 1:
            rig.signal.cancel(1)

    rig.executor.during = cancel
    rig.put(1, is_image=True)
    (answer,) = rig.run()
    assert (answer.error, answer.was_tried) == ("cancelled while the rank was at it", False)
    assert len(rig.executor.done) == 2 and rig.executor.num_left == 1
    assert not rig.signal.wait_layers(1, 1, 0.0)


def test_a_late_image_ends_at_its_next_step(rig: Rig) -> None:
    """Its rank was too slow, which counts as tried; one that is late before it begins does not."""
    rig.put(1, is_image=True, deadline=102.5)
    rig.put(2, is_image=True, deadline=99.0)
    late, never = rig.run()
    assert (late.error, late.was_tried) == ("deadline passed while the rank was at it", True)
    assert (never.error, never.was_tried) == ("deadline passed before the rank began", False)
    assert rig.executor.done == [(1, 0), (1, 1), (1, 2)]


def test_a_failing_step_is_the_images_failure(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    """And the lane goes on with what comes behind it."""

    def fail(task_id: int, number: int) -> None:
        if (task_id, number) == (1, 2):
            raise ValueError("no more")

    rig.executor.during = fail
    rig.put(1, is_image=True)
    rig.put(2)
    answers = dict(zip(("small", "image"), rig.run(), strict=True))
    assert answers["image"].error == "ValueError: no more" and answers["image"].was_tried
    assert answers["small"].error is None and rig.ids == [2, 1]
    assert "event=task_failed task_id=1" in caplog.text
    caplog.clear()  # the traceback has the words' memory


def test_blame_goes_by_what_the_rank_says() -> None:
    """A process that dies with a small task between two steps of an image has begun the small one: not the oldest is
    blamed. Where it says nothing that it owes, the oldest is."""
    flights, says = Flights(), {Lane.IN: 7}
    for task_id in (5, 6, 7, 8):
        units = (NOTHING,) if task_id in (5, 6) else ()
        flights.add(_flying(task_id, 10.0, units), [0])

    def is_at(lane: Lane, task_id: int) -> bool:
        return says[lane] == task_id

    assert flights.working_on(0, is_at) == {7}
    says[Lane.IN] = 3
    assert flights.working_on(0, is_at) == {5}


def test_an_image_is_stuck_behind_what_stands_before_it() -> None:
    """While a small task is owed, its deadline says when the lane is stuck; then that of the first image."""
    flights = Flights()
    flights.add(_flying(1, 50.0, (NOTHING,)), [0])
    flights.add(_flying(2, 20.0, (NOTHING,)), [0])
    small = flights.add(_flying(3, 30.0, ()), [0])
    assert flights.stuck_at() == {(0, Lane.IN): (30.5, 3)}
    flights.answer(small, RankResult(rank=0), 31.0)
    assert flights.stuck_at() == {(0, Lane.IN): (50.5, 1)}, "the other one is late through no fault of the rank"


def _flying(task_id: int, deadline: float, units: tuple[Any, ...]) -> TransferTask:
    return TransferTask(
        task_id=task_id, kind=TaskKind.SWAP_IN, source_ids=NOTHING, destination_ids=NOTHING, deadline=deadline,
        units=units,
    )  # fmt: skip
