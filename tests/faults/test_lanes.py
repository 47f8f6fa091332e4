"""Loads and stores are two lanes: none waits for the other, none starves, each is bounded, each task is answered."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import numpy as np
import pytest

from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferResult
from tests.rigs.answers import SECONDS, Answers, task
from tests.rigs.big_client import ALL, arrays, big_client, clear, fill
from tests.rigs.process_ends import pids
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

OUT, IN, COPY = TaskKind.SWAP_OUT, TaskKind.SWAP_IN, TaskKind.COPY
LONG = 1000.0


def order(answers: Answers) -> list[int]:
    """Task ids in the order of their answers."""
    return [result.task.task_id for result in answers.now()]


def resume(client: RankClient, rank: int = 0) -> None:
    os.kill(pids(client)[rank], signal.SIGCONT)


@pytest.mark.parametrize("quick", [IN, COPY])
def test_a_load_does_not_wait_for_the_stores_before_it(quick: TaskKind) -> None:
    """Submitted behind 80 stores of 16 MiB each, a load or copy of one block is answered before the last of them."""
    with big_client() as (client, answers):
        for number in range(80):
            client.submit(task(number, OUT, ALL, ALL))
        client.submit(task(100, quick, [3], [5]))
        answers.wait(81)
        assert order(answers).index(100) < order(answers).index(79)
        assert [number for number in order(answers) if number != 100] == list(range(80)), "a lane keeps its order"
        assert all(result.error is None for result in answers.now())


def test_a_store_does_not_wait_for_the_loads_before_it() -> None:
    """The other way round: the store is answered before the last of many long loads."""
    with big_client() as (client, answers):
        for number in range(80):
            client.submit(task(number, IN, ALL, ALL))
        client.submit(task(100, OUT, [3], [18]))
        answers.wait(81)
        assert order(answers).index(100) < order(answers).index(79)
        assert all(result.error is None for result in answers.now())


def test_both_directions_under_load_all_finish() -> None:
    """Two threads fill both lanes of two ranks: each task ends well, each lane keeps its order, the bytes are right."""
    with big_client(tp_size=2) as (client, answers):
        wanted = [fill(client, rank) for rank in range(2)]
        client.submit(task(0, OUT, [0, 1, 2, 3], [0, 1, 2, 3]))
        assert answers.wait(1)[0].error is None

        together = threading.Barrier(2)  # or one thread may have all its tasks answered before the other begins

        def submit(first: int, kind: TaskKind, gpu: list[int], cpu: list[int]) -> None:
            for number in range(first, first + 100):
                together.wait(SECONDS)
                client.submit(task(number, kind, gpu, cpu, LONG))

        loads = threading.Thread(target=submit, args=(1000, IN, [12, 13, 14, 15], [3, 2, 1, 0]))
        stores = threading.Thread(target=submit, args=(2000, OUT, [4, 5, 6, 7], [9, 8, 7, 6]))
        for thread in (loads, stores):
            thread.start()
        for thread in (loads, stores):
            thread.join(SECONDS)
        answers.wait(201)
        for first in (1000, 2000):  # which lane is answered first is the operating system's to say
            lane = [number for number in order(answers) if first <= number < first + 100]
            assert lane == list(range(first, first + 100))
        client.submit(task(3000, IN, [8, 9, 10, 11], [9, 8, 7, 6]))
        answers.wait(202)
        assert all(result.error is None for result in answers.now())
        assert sorted(order(answers)) == [0, *range(1000, 1100), *range(2000, 2100), 3000]
        for rank in range(2):
            for array, old in zip(arrays(client, rank), wanted[rank], strict=True):
                assert np.array_equal(array[12:16], old[[3, 2, 1, 0]]) and np.array_equal(array[8:12], old[4:8])


def test_loads_cancelled_behind_a_long_one_are_not_done() -> None:
    """They are answered as failed, their destinations keep what they hold, and the long one in front is whole."""
    with big_client() as (client, answers):
        wanted = fill(client)
        client.submit(task(1, OUT, ALL, ALL))
        assert answers.wait(1)[0].error is None
        clear(client)
        stopped(pids(client)[0])
        client.submit(task(2, IN, range(10), range(10)))
        for number in range(10, 16):
            client.submit(task(number, IN, [number], [number]))
        for number in range(10, 15):
            client.cancel(number)
        resume(client)
        answers.wait(8)
        for number in range(10, 15):
            assert "cancelled" in str(answers.of(number)[0].error)
        assert answers.of(2)[0].error is None and answers.of(15)[0].error is None
        for array, old in zip(arrays(client), wanted, strict=True):
            assert np.array_equal(array[:10], old[:10]) and np.array_equal(array[15], old[15])
            assert not array[10:15].any()


@pytest.mark.parametrize("is_stopped", [True, False], ids=["stopped", "copying"])
def test_a_ranks_death_in_both_directions_answers_everything(
    is_stopped: bool,
    eventually: Callable[..., None],
) -> None:
    """Each task has one answer; those that the dead rank had not done fail; the next incarnation works."""
    for _ in range(10):  # where the thread that notices two answers is late, the rank may have done them all by then
        num_failed = die_in_both_directions(is_stopped, eventually)
        if num_failed:
            break
    assert num_failed == 120 if is_stopped else 0 < num_failed < 120


def die_in_both_directions(is_stopped: bool, eventually: Callable[..., None]) -> int:
    """Kill a rank that has 120 tasks, before it begins or when two are answered; how many failed."""
    with big_client(tp_size=2) as (client, answers):
        victim = pids(client)[1]
        stopped(victim)  # until all tasks lie before it: else it may have done them before it is killed

        def answer_and_kill(result: TransferResult) -> None:
            answers(result)
            if len(answers.now()) == 2:  # on the thread that notices it: another might be late
                os.kill(victim, signal.SIGKILL)

        if not is_stopped:
            client._processes.io.callbacks.on_result = answer_and_kill
        for number in range(120):
            client.submit(task(number, IN if number % 2 else OUT, ALL, ALL, LONG))
        if is_stopped:
            eventually(lambda: [flight.waiting for flight in client._processes.io.tasks.flights.all()] == [{1}] * 120)
            os.kill(victim, signal.SIGKILL)
        else:
            os.kill(victim, signal.SIGCONT)
        results = answers.wait(120)
        assert sorted(order(answers)) == list(range(120))
        failed = [result for result in results if result.error is not None]
        assert all("rank 1" in str(result.error) for result in failed)
        eventually(lambda: client.statuses()[1].num_restarts == 1)
        assert client.wait_ready(SECONDS) and all(client.has_room(kind) for kind in TaskKind)
        for task_id, kind in ((200, OUT), (201, IN)):
            client.submit(task(task_id, kind, [0], [0]))
        assert all(result.error is None for result in answers.wait(122)[120:])
        return len(failed)


def test_more_tasks_than_a_lane_holds_are_refused_at_once() -> None:
    """Of a stopped rank: beyond `max_tasks_in_flight` the answer comes inside `submit`, in each lane by itself."""
    with big_client(max_tasks_in_flight=4) as (client, answers):
        stopped(pids(client)[0])
        for first, kind in ((0, OUT), (100, IN)):
            before = len(answers.now())
            for number in range(first, first + 4):
                client.submit(task(number, kind, [number % 16], [number % 20], LONG))
                assert len(answers.now()) == before, "it has its place in the queue"
            for number in range(first + 4, first + 7):
                client.submit(task(number, kind, [0], [0], LONG))
                (result,) = answers.of(number)
                assert result.error == "rank 0: the ranks cannot take a task now"
        resume(client)
        answers.wait(14)
        assert sorted(order(answers)[6:]) == [0, 1, 2, 3, 100, 101, 102, 103], "nothing refused was kept for later"
        assert all(result.error is None for result in answers.now()[6:])


@pytest.mark.parametrize("kind", [OUT, IN])
def test_a_task_whose_deadline_passed_in_the_queue_is_left_out(kind: TaskKind) -> None:
    """The rank says so and copies nothing; it lives on, and does what is behind."""
    with big_client() as (client, answers):
        wanted = fill(client)
        client.submit(task(1, kind, ALL, ALL))
        late = ([2], [18]) if kind is OUT else ([2], [19])
        client.submit(task(2, kind, *late, timeout_seconds=0.0))
        client.submit(task(3, kind, [3], [17]))
        answers.wait(3)
        assert "deadline passed before the rank began" in str(answers.of(2)[0].error)
        assert answers.of(1)[0].error is None and answers.of(3)[0].error is None
        assert client.statuses()[0].num_restarts == 0 and client.available
        if kind is OUT:
            clear(client)
            client.submit(task(4, IN, [2, 3], [18, 17]))
            assert answers.wait(4)[-1].error is None
            for array, old in zip(arrays(client), wanted, strict=True):
                assert not array[2].any() and np.array_equal(array[3], old[3])
