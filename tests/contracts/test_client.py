"""What every transfer client promises: each task answered once, the bytes on every rank, an end that is an end."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from ipc.errors import NotEnoughMemoryError
from tests.contracts.answers import SECONDS, Answers, task
from transfer_manager.client import InlineClient, TransferClient
from transfer_manager.config import TransferConfig
from transfer_manager.layout import KVLayout
from transfer_manager.rank_client import RankClient
from transfer_manager.task import Direction

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float16")
BLOCK_SIZE, NUM_GPU, NUM_CPU = 4, 16, 24
OUT, IN = Direction.SWAP_OUT, Direction.SWAP_IN


def new_client(kind: str, tp_size: int, num_gpu: int = NUM_GPU) -> TransferClient:
    layout = LAYOUT.for_rank(tp_size, BLOCK_SIZE)
    if kind == "inline":
        return InlineClient(layout, num_gpu, NUM_CPU, tp_size)
    return RankClient(TransferConfig(tp_size=tp_size), layout, num_gpu, NUM_CPU)


KINDS = [("inline", 1), ("inline", 2), ("ranks", 1), ("ranks", 2)]


@pytest.fixture(params=KINDS, ids=lambda kind: f"{kind[0]}-tp{kind[1]}")
def kind(request: pytest.FixtureRequest) -> tuple[str, int]:
    """Which client, and how many ranks."""
    return request.param


@pytest.fixture
def client(kind: tuple[str, int]) -> Iterator[TransferClient]:
    """Made but not started; stopped at the end."""
    made = new_client(*kind)
    yield made
    made.stop()
    made.__dict__.clear()  # pytest still holds it when the leak fixture looks; views keep their mapping


@pytest.fixture
def answers(client: TransferClient) -> Answers:
    """The client is started and answers here."""
    collected = Answers()
    client.start(collected)
    return collected


def fill(client: TransferClient, tp_size: int) -> None:
    for rank in range(tp_size):
        noise = np.random.default_rng(rank)
        for layer in client.kv_views(rank):
            for array in layer.values():
                array[:] = noise.integers(0, 1000, array.shape)


def test_kv_views_have_the_layouts_shapes(client: TransferClient, answers: Answers, kind: tuple[str, int]) -> None:
    """Per layer key and value, each [blocks, block_size, heads of the rank, head_dim], ranks' memory apart."""
    _, tp_size = kind
    for rank in range(tp_size):
        views = client.kv_views(rank)
        assert [list(layer) for layer in views] == [["key", "value"]] * 3
        for layer in views:
            for array in layer.values():
                assert array.shape == (NUM_GPU, BLOCK_SIZE, 4 // tp_size, 8) and array.dtype == np.float16
                assert not array.any(), "fresh memory is zeros"
                array[:] = rank + 1
    assert all(client.kv_views(rank)[2]["value"][5, 0, 0, 0] == rank + 1 for rank in range(tp_size))


def test_bytes_arrive_on_every_rank(client: TransferClient, answers: Answers, kind: tuple[str, int]) -> None:
    """Swapped out, overwritten and swapped in to other blocks, each rank has its own bytes back in all layers."""
    _, tp_size = kind
    fill(client, tp_size)
    gpu, cpu, target = [3, 9, 4, 15], [20, 0, 7, 8], [5, 6, 14, 3]
    wanted = [[a[gpu].copy() for layer in client.kv_views(r) for a in layer.values()] for r in range(tp_size)]
    client.submit(task(1, OUT, gpu, cpu))
    answers.wait(1)
    for rank in range(tp_size):
        for layer in client.kv_views(rank):
            for array in layer.values():
                array[:] = -1
    client.submit(task(2, IN, target, cpu))
    for result in answers.wait(2):
        assert result.error is None and sorted(r.rank for r in result.ranks) == list(range(tp_size))
        assert {r.num_bytes for r in result.ranks} == {4 * LAYOUT.for_rank(tp_size, BLOCK_SIZE).block_bytes}
    for rank in range(tp_size):
        arrays = [array for layer in client.kv_views(rank) for array in layer.values()]
        assert all(np.array_equal(a[target], w) for a, w in zip(arrays, wanted[rank], strict=True))
        assert all((a[[0, 1, 2]] == -1).all() for a in arrays)


def test_each_task_is_answered_exactly_once(client: TransferClient, answers: Answers) -> None:
    """From many threads: as many answers as tasks, one for each, good and bad ones alike, and none after stop."""
    num_tasks = 60
    numbers = list(range(num_tasks))
    random.Random(1).shuffle(numbers)

    def submit(mine: list[int]) -> None:
        for number in mine:
            bad = number % 5 == 0
            client.submit(task(number, OUT, [NUM_GPU if bad else number % NUM_GPU], [number % NUM_CPU]))

    threads = [threading.Thread(target=submit, args=(numbers[i::4],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    answers.wait(num_tasks)
    client.stop()
    results = answers.now()
    assert sorted(result.task.task_id for result in results) == list(range(num_tasks))
    for result in results:
        assert (result.error is not None) == (result.task.task_id % 5 == 0)


def test_a_bad_task_is_answered_as_failed_and_the_next_one_works(client: TransferClient, answers: Answers) -> None:
    """A task that cannot be done is that task's failure only: `submit` does not raise and the client lives on."""
    client.submit(task(1, OUT, [0], [NUM_CPU]))
    client.submit(task(2, IN, [0, 1], [0]))
    client.submit(task(3, OUT, [0], [0]))
    by_id = {result.task.task_id: result for result in answers.wait(3)}
    assert "DeviceError" in str(by_id[1].error) and "DeviceError" in str(by_id[2].error)
    assert by_id[3].error is None and client.available


def test_submit_after_stop_is_answered_as_failed(client: TransferClient, answers: Answers) -> None:
    """A caller that races with the end gets its answer like any other."""
    client.stop()
    assert not client.available
    client.submit(task(1, OUT, [0], [0]))
    (result,) = answers.wait(1)
    assert result.error is not None and result.task.task_id == 1


def test_tasks_racing_with_stop_are_all_answered(client: TransferClient, answers: Answers) -> None:
    """Whether a task came before or after the end, it has exactly one answer when both are through."""
    begun = threading.Event()

    def submit() -> None:
        for number in range(200):
            client.submit(task(number, OUT, [number % NUM_GPU], [number % NUM_CPU]))
            if number == 20:
                begun.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert begun.wait(SECONDS)
    client.stop()
    thread.join(SECONDS)
    assert sorted(result.task.task_id for result in answers.now()) == list(range(200))


def test_stop_twice_and_from_two_threads(client: TransferClient, answers: Answers) -> None:
    """The second stop, also at the same time, is as good as the first."""
    failures: list[BaseException] = []
    both = threading.Barrier(2)

    def stop() -> None:
        both.wait(SECONDS)
        try:
            client.stop()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=stop) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    client.stop()
    assert failures == [] and not any(status.up for status in client.statuses())


def test_stop_before_start(client: TransferClient) -> None:
    """A client that never started has nothing to end and leaves nothing (the leak fixture looks)."""
    client.stop()
    assert not client.available


def test_views_outlive_the_client(client: TransferClient, answers: Answers) -> None:
    """What the model holds stays valid memory after stop."""
    view = client.kv_views(0)[0]["key"]
    view[:] = 3
    client.stop()
    assert (view == 3).all()


@pytest.mark.parametrize("kind", ["inline", "ranks"])
def test_pools_that_do_not_fit_take_nothing(kind: str) -> None:
    """NotEnoughMemoryError with the numbers, and neither process nor descriptor is left (the leak fixture looks)."""
    with pytest.raises(NotEnoughMemoryError, match=r"bytes.*are available"):
        new_client(kind, 2, num_gpu=2**40)


def test_ranks_are_told(client: TransferClient, answers: Answers, kind: tuple[str, int]) -> None:
    """One status for each process, up and never restarted; none where there are no processes."""
    statuses = client.statuses()
    assert [status.rank for status in statuses] == (list(range(kind[1])) if kind[0] == "ranks" else [])
    assert all(status.up and status.pid and status.num_restarts == 0 for status in statuses)
    assert all(first.pid != second.pid for first, second in pairwise(statuses))


def test_simulation_moves_nothing_and_answers() -> None:
    """Without a layout the inline client keeps the books only."""
    collected, client = Answers(), InlineClient(None, NUM_GPU, NUM_CPU, tp_size=2)
    client.start(collected)
    client.submit(task(1, OUT, [0], [0]))
    (result,) = collected.wait(1)
    assert result.error is None and [r.num_bytes for r in result.ranks] == [0, 0]
    client.stop()
