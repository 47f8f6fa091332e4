"""A worker in another process follows loads layer by layer: what it is told is true, and it is never left waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest

from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.answers import task
from tests.rigs.big_client import ALL, BLOCK_SIZE, LAYOUT, NUM_CPU, NUM_GPU, NUM_LAYERS, big_client, clear, fill
from tests.rigs.kv_worker import KVWorker, digest, kv_worker, layer_bytes
from tests.rigs.process_ends import pids
from tests.rigs.stopping import stopped

pytestmark = pytest.mark.processes

OUT, IN = TaskKind.SWAP_OUT, TaskKind.SWAP_IN
LONG = 1000.0  # the waiters' own deadline: nobody here sees it
NOTHING_CAME = [False] * NUM_LAYERS
SCATTERED = [11, 3, 7, 0, 14, 5, 9, 1]


@pytest.fixture
def worker() -> Iterator[KVWorker]:
    """A process that can open handles."""
    with kv_worker(LAYOUT.for_rank(1, BLOCK_SIZE), NUM_GPU) as started:
        yield started


def attach(worker: KVWorker, client: RankClient) -> None:
    """It opens the rank's arrays and the progress of its loads."""
    progress = client.layer_progress(0)
    assert progress is not None
    worker.ask("open_kv", client.kv_handle(0).to_bytes().hex())
    worker.ask("open_progress", progress.handle().hex())


def wait_in(worker: KVWorker, load_id: int) -> None:
    """Its threads wait for every layer of a load."""
    worker.tell("wait_all", load_id, LONG)
    assert worker.answer() == "waiting"


def submit_to_stopped(client: RankClient, task_id: int) -> int:
    """A load that is surely not done: its rank is stopped. Returns the rank's pid."""
    (pid,) = pids(client)
    stopped(pid)
    client.submit(task(task_id, IN, ALL, ALL, LONG))
    return pid


def test_a_layer_is_in_when_its_wait_returns(worker: KVWorker) -> None:
    """Every layer's bytes, read the moment its wait says True, are those that were stored; load after load."""
    with big_client() as (client, answers):
        attach(worker, client)
        fill(client)
        views = client.kv_views(0)
        wanted = [digest(layer_bytes(views, layer, SCATTERED)) for layer in range(NUM_LAYERS)]
        sources = list(range(NUM_CPU - len(SCATTERED), NUM_CPU))
        client.submit(task(1, OUT, SCATTERED, sources))
        assert answers.wait(1)[0].error is None
        for task_id in range(2, 22):
            clear(client)
            client.submit(task(task_id, IN, SCATTERED, sources))
            worker.tell("follow", task_id, SCATTERED, LONG)
            assert worker.answer() == [[True, each] for each in wanted]
            assert answers.wait(task_id)[-1].error is None
        assert worker.ask("wait_all", 21, LONG) == "waiting" and worker.answer() == [True] * NUM_LAYERS


def test_waiters_of_a_failed_load_hear_it(worker: KVWorker) -> None:
    """A load that the device refuses: False for every layer; the next load is followed as ever."""
    with big_client() as (client, answers):
        attach(worker, client)
        client.submit(task(1, IN, [0], [NUM_CPU]))
        wait_in(worker, 1)
        assert worker.answer() == NOTHING_CAME
        assert "DeviceError" in str(answers.wait(1)[0].error)
        client.submit(task(2, IN, [0], [0]))
        wait_in(worker, 2)
        assert worker.answer() == [True] * NUM_LAYERS


def test_waiters_of_a_cancelled_load_hear_it(worker: KVWorker) -> None:
    """The rank leaves it out and says so to whoever still waits."""
    with big_client() as (client, answers):
        attach(worker, client)
        pid = submit_to_stopped(client, 1)
        wait_in(worker, 1)
        client.cancel(1)
        os.kill(pid, signal.SIGCONT)
        assert worker.answer() == NOTHING_CAME
        assert "cancelled" in str(answers.wait(1)[0].error)


def test_waiters_of_a_load_past_its_deadline_hear_it(worker: KVWorker) -> None:
    """The load's deadline ends their wait, not their own."""
    with big_client() as (client, answers):
        attach(worker, client)
        client.submit(task(1, IN, ALL, ALL, timeout_seconds=0.0))
        wait_in(worker, 1)
        assert worker.answer() == NOTHING_CAME
        assert "deadline passed" in str(answers.wait(1)[0].error)


def test_a_waiter_has_a_deadline_of_its_own(worker: KVWorker) -> None:
    """A load that does not move: False when the waiter's own time is over, and the load is none the worse."""
    with big_client() as (client, answers):
        attach(worker, client)
        pid = submit_to_stopped(client, 1)
        assert worker.ask("wait_all", 1, 0.01) == "waiting" and worker.answer() == NOTHING_CAME
        os.kill(pid, signal.SIGCONT)
        assert answers.wait(1)[0].error is None
        assert worker.ask("wait_all", 1, LONG) == "waiting" and worker.answer() == [True] * NUM_LAYERS


def test_a_killed_rank_wakes_all_waiters(worker: KVWorker) -> None:
    """Death in the middle of a load: every waiter hears False, its own deadline being far; the next rank is heard."""
    with big_client() as (client, answers):
        attach(worker, client)
        pid = submit_to_stopped(client, 1)
        wait_in(worker, 1)
        os.kill(pid, signal.SIGKILL)
        assert worker.answer() == NOTHING_CAME
        assert "exited with code -9" in str(answers.wait(1)[0].error)
        assert client.wait_ready(30)
        client.submit(task(2, IN, ALL, ALL))
        wait_in(worker, 2)
        assert worker.answer() == [True] * NUM_LAYERS


def test_a_rank_killed_as_stuck_wakes_all_waiters(worker: KVWorker) -> None:
    """A rank that hangs past the task's deadline is killed, and that ends the wait."""
    with big_client() as (client, answers):
        attach(worker, client)
        stopped(pids(client)[0])
        client.submit(task(1, IN, ALL, ALL, timeout_seconds=0.1))
        wait_in(worker, 1)
        assert worker.answer() == NOTHING_CAME
        assert "passed its deadline" in str(answers.wait(1)[0].error)


def test_the_end_of_the_client_wakes_all_waiters(worker: KVWorker) -> None:
    """Stopping while a load is in flight: it will not come, and its waiters hear so."""
    with big_client(stop_timeout_seconds=0.2) as (client, answers):
        attach(worker, client)
        submit_to_stopped(client, 1)
        wait_in(worker, 1)
        client.stop()
        assert worker.answer() == NOTHING_CAME
        assert answers.of(1)[0].error is not None


def test_a_load_refused_by_a_full_queue_wakes_its_waiters(worker: KVWorker) -> None:
    """`not now` is heard in the worker, too; the load before it is none the worse."""
    with big_client(max_tasks_in_flight=1) as (client, answers):
        attach(worker, client)
        pid = submit_to_stopped(client, 1)
        wait_in(worker, 2)
        client.submit(task(2, IN, [0], [0], LONG))
        assert worker.answer() == NOTHING_CAME
        wait_in(worker, 1)
        os.kill(pid, signal.SIGCONT)
        assert worker.answer() == [True] * NUM_LAYERS
        assert [result.task.task_id for result in answers.wait(2)] == [2, 1]


def test_a_load_while_the_rank_is_down_wakes_its_waiters(worker: KVWorker) -> None:
    """Between a death and the restart every load is refused, and whoever waits for it hears so."""
    with big_client(restart_backoff_seconds=1000.0) as (client, answers):
        attach(worker, client)
        os.kill(submit_to_stopped(client, 1), signal.SIGKILL)
        answers.wait(1)
        wait_in(worker, 2)
        client.submit(task(2, IN, [0], [0], LONG))
        assert worker.answer() == NOTHING_CAME
        assert answers.of(2)[0].error is not None


def test_a_waiter_that_was_away_for_long_is_not_left_waiting(worker: KVWorker) -> None:
    """Its load ended hundreds of loads ago: the wait ends at once, with an honest answer or with False."""
    with big_client() as (client, answers):
        attach(worker, client)
        for task_id in range(1, 1200):
            client.submit(task(task_id, IN, [], []))
            answers.wait(task_id)
        assert worker.ask("wait_all", 1, LONG) == "waiting" and worker.answer() == NOTHING_CAME
        assert worker.ask("wait_all", 1150, LONG) == "waiting" and worker.answer() == [True] * NUM_LAYERS
