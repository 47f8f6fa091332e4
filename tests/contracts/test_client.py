"""What every transfer client promises: each task answered once, the bytes on every rank, an end that is an end."""

from __future__ import annotations

import dataclasses
import os
import random
import signal
import threading
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from fastdeploy_cache.errors import NotEnoughMemoryError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.task import TaskKind
from tests.rigs.answers import SECONDS, Answers, task
from tests.rigs.kv_worker import digest, kv_worker, layer_bytes
from tests.rigs.process_ends import pids
from tests.rigs.stopping import stopped

LAYOUT = KVLayout(num_layers=3, num_kv_heads=4, head_dim=8, dtype="float16")
BLOCK_SIZE, NUM_GPU, NUM_CPU = 4, 16, 24
OUT, IN, COPY = TaskKind.SWAP_OUT, TaskKind.SWAP_IN, TaskKind.COPY


def new_client(kind: str, tp_size: int, num_gpu: int = NUM_GPU) -> TransferClient:
    layout = LAYOUT.for_rank(tp_size, BLOCK_SIZE)
    if kind == "inline":
        return InlineClient(layout, num_gpu, NUM_CPU, tp_size)
    return RankClient(TransferConfig(tp_size=tp_size), layout, num_gpu, NUM_CPU)


KINDS = [
    pytest.param((kind, tp_size), marks=[pytest.mark.processes] * (kind == "ranks"), id=f"{kind}-tp{tp_size}")
    for kind in ("inline", "ranks")
    for tp_size in (1, 2)
]


@pytest.fixture(params=KINDS)
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


def arrays_of(client: TransferClient, tp_size: int) -> list[np.ndarray]:
    """Of all ranks, layers and parts."""
    return [array for rank in range(tp_size) for layer in client.kv_views(rank) for array in layer.values()]


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


def test_a_copy_within_the_gpu_copies_the_leading_tokens(
    client: TransferClient, answers: Answers, kind: tuple[str, int]
) -> None:
    """COPY with `num_tokens` writes these tokens of the destination blocks and not a byte else; without it, all."""
    _, tp_size = kind
    block_bytes = LAYOUT.for_rank(tp_size, BLOCK_SIZE).block_bytes
    sources, targets = [3, 9, 4], [15, 0, 8]
    for task_id, num_tokens in ((1, 1), (2, 3), (3, None)):
        fill(client, tp_size)
        wanted = [array.copy() for array in arrays_of(client, tp_size)]
        for array in wanted:
            array[targets, :num_tokens] = array[sources, :num_tokens]
        client.submit(dataclasses.replace(task(task_id, COPY, sources, targets), num_tokens=num_tokens))
        result = answers.wait(task_id)[-1]
        num_bytes = 3 * block_bytes * (num_tokens or BLOCK_SIZE) // BLOCK_SIZE
        assert result.error is None and [r.num_bytes for r in result.ranks] == [num_bytes] * tp_size
        assert all(np.array_equal(a, w) for a, w in zip(arrays_of(client, tp_size), wanted, strict=True))


def test_a_cancel_after_the_end_changes_nothing(
    client: TransferClient, answers: Answers, kind: tuple[str, int]
) -> None:
    """The task keeps its one answer, the bytes stay, and the tasks that come later are done."""
    _, tp_size = kind
    fill(client, tp_size)
    wanted = [array[3].copy() for array in arrays_of(client, tp_size)]
    client.submit(task(1, OUT, [3], [7]))
    assert answers.wait(1)[0].error is None
    client.cancel(1)
    for array in arrays_of(client, tp_size):
        array[3] = -1
    client.submit(task(2, IN, [3], [7]))
    assert answers.wait(2)[1].error is None
    client.cancel(2)
    assert all(np.array_equal(a[3], w) for a, w in zip(arrays_of(client, tp_size), wanted, strict=True))
    client.stop()
    assert [result.task.task_id for result in answers.now()] == [1, 2]


@pytest.mark.processes
@pytest.mark.parametrize("tp_size", [1, 2])
def test_a_task_cancelled_before_a_rank_began_it_copies_nothing(tp_size: int) -> None:
    """Of stopped ranks: every kind of task is answered as failed, once; its neighbours in the queue are done."""
    client, answers = new_client("ranks", tp_size), Answers()
    client.start(answers)
    try:
        fill(client, tp_size)
        before = [array.copy() for array in arrays_of(client, tp_size)]
        for pid in pids(client):
            stopped(pid)
        tasks = [task(1, OUT, [1], [1]), task(2, OUT, [2], [2]), task(3, COPY, [3], [4]), task(4, COPY, [5], [6])]
        for each in tasks:
            client.submit(each)
        client.cancel(2)
        client.cancel(4)
        for pid in pids(client):
            os.kill(pid, signal.SIGCONT)
        answers.wait(4)
        client.submit(task(5, IN, [10, 11], [1, 2]))
        assert answers.wait(5)[-1].error is None
        for array, old in zip(arrays_of(client, tp_size), before, strict=True):
            assert np.array_equal(array[10], old[1]) and not array[11].any(), "nothing was written to CPU block 2"
            assert np.array_equal(array[4], old[3]) and np.array_equal(array[6], old[6])
        client.stop()
        assert sorted(result.task.task_id for result in answers.now()) == [1, 2, 3, 4, 5]
        for task_id in (2, 4):
            assert "cancelled before the rank began" in str(answers.of(task_id)[0].error)
        assert answers.of(1)[0].error is None and answers.of(3)[0].error is None
    finally:
        client.stop()


def test_there_is_room_while_the_client_is_ready(client: TransferClient, answers: Answers) -> None:
    """Room for every kind of task in an idle client; after its end in none."""
    assert all(client.has_room(kind) for kind in TaskKind)
    client.stop()
    assert not any(client.has_room(kind) for kind in TaskKind)


@pytest.mark.processes
def test_a_full_lane_does_not_close_the_other_one() -> None:
    """Room is counted by lane: stores fill theirs, loads and copies share the other; it comes back with the answers."""
    layout, answers = LAYOUT.for_rank(1, BLOCK_SIZE), Answers()
    client = RankClient(TransferConfig(max_tasks_in_flight=2), layout, NUM_GPU, NUM_CPU)
    client.start(answers)
    try:
        stopped(pids(client)[0])
        for task_id in (1, 2):
            assert client.has_room(OUT)
            client.submit(task(task_id, OUT, [task_id], [task_id]))
        assert [client.has_room(kind) for kind in (OUT, IN, COPY)] == [False, True, True]
        client.submit(task(3, IN, [3], [3]))
        client.submit(task(4, COPY, [4], [5]))
        assert [client.has_room(kind) for kind in (OUT, IN, COPY)] == [False, False, False]
        os.kill(pids(client)[0], signal.SIGCONT)
        assert all(result.error is None for result in answers.wait(4))
        assert all(client.has_room(kind) for kind in TaskKind)
    finally:
        client.stop()


@pytest.mark.processes
def test_another_process_opens_the_arrays_by_their_handle(
    client: TransferClient, answers: Answers, kind: tuple[str, int]
) -> None:
    """A worker that got a rank's handle as bytes sees that rank's bytes, and what it writes is seen here."""
    _, tp_size = kind
    fill(client, tp_size)
    for rank in range(tp_size):
        with kv_worker(LAYOUT.for_rank(tp_size, BLOCK_SIZE), NUM_GPU) as worker:
            worker.ask("open_kv", client.kv_handle(rank).to_bytes().hex())
            views, blocks = client.kv_views(rank), list(range(NUM_GPU))
            assert worker.ask("digests", blocks) == [digest(layer_bytes(views, i, blocks)) for i in range(3)]
            worker.ask("write", 5, 60 + rank)
    for rank in range(tp_size):
        arrays = [array for layer in client.kv_views(rank) for array in layer.values()]
        assert all((array[5].view(np.uint8) == 60 + rank).all() for array in arrays)
