"""What every transfer client promises of checkpoints: their bytes on every rank, in steps, and no rank that dies."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.groups import KVGroup, StatePart
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout, RankLayout
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask
from tests.rigs.answers import SECONDS, Answers, task
from tests.rigs.hybrid_models import SMALL
from tests.rigs.process_ends import pids
from tests.rigs.stopping import stopped

OUT, IN, COPY = TaskKind.SWAP_OUT, TaskKind.SWAP_IN, TaskKind.COPY
NUM_GPU, NUM_CPU, NUM_UNITS = 16, 24, 6
UNITS = [[4, 1, 3], [5], [0, 2, 5]]  # of the window, the state and the chunk
TARGETS = [[0, 2, 5], [1], [4, 1, 3]]
KINDS = [
    pytest.param((kind, tp_size, owner), marks=marks, id=f"{kind}-{tp_size}-{owner}")
    for kind, owner, marks in (
        ("inline", "engine", ()),
        ("ranks", "engine", pytest.mark.processes),
        ("ranks", "transfer", pytest.mark.processes),
    )
    for tp_size in (1, 2)
]
STATE = KVGroup(kind="state", layers=(1, 2, 3, 4), parts=(StatePart(name="s", shape=(4 * 2**20,)),))
GROUPS = (KVGroup(kind="full", layers=(0,)), STATE)
LARGE = KVLayout(num_layers=5, num_kv_heads=4, head_dim=128, dtype="float32", groups=GROUPS)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> tuple[str, int, str]:
    """Which client, how many ranks, and who has the arrays."""
    return request.param


def layout_of(tp_size: int) -> RankLayout:
    return dataclasses.replace(SMALL.for_rank(tp_size, 4), num_units=(NUM_UNITS,) * 3)


@pytest.fixture
def client(kind: tuple[str, int, str]) -> Iterator[TransferClient]:
    """Made but not started; stopped at the end."""
    name, tp_size, owner = kind
    made: TransferClient
    if name == "inline":
        made = InlineClient(layout_of(tp_size), NUM_GPU, NUM_CPU, tp_size)
    else:
        config = TransferConfig(tp_size=tp_size, kv_owner=owner)  # type: ignore[arg-type]
        made = RankClient(config, layout_of(tp_size), NUM_GPU, NUM_CPU)
    yield made
    made.stop()
    made.__dict__.clear()  # pytest still holds it when the leak fixture looks; views keep their mapping


@pytest.fixture
def answers(client: TransferClient) -> Answers:
    """The client is started and answers here."""
    collected = Answers()
    client.start(collected)
    return collected


def image(task_id: int, kind: TaskKind, units: list[list[int]], pages: list[int]) -> TransferTask:
    ids = tuple(np.array(each, np.int32) for each in units)
    return dataclasses.replace(task(task_id, kind, [], pages), units=ids)


def rows(client: TransferClient, layout: RankLayout, rank: int) -> list[list[np.ndarray]]:
    """A rank's arrays by row: [blocks or units, ...]."""
    views = client.kv_views(rank)
    layers = [[number for number in range(layout.num_layers) if layout.row_of(number) == row] for row in range(4)]
    return [[array for number in numbers for array in views[number].values()] for numbers in layers]


def fill(client: TransferClient, layout: RankLayout, tp_size: int, value: int | None = None) -> None:
    """With a value, or with noise."""
    noise = np.random.default_rng(3)
    for rank in range(tp_size):
        for row in rows(client, layout, rank):
            for array in row:
                array[:] = noise.integers(0, 100, array.shape) if value is None else value


def num_pages(layout: RankLayout) -> int:
    return -(-sum(layout.unit_bytes(row) * len(units) for row, units in enumerate(UNITS, 1)) // layout.block_bytes)


def test_an_image_arrives_on_every_rank(client: TransferClient, answers: Answers, kind: tuple[str, int, str]) -> None:
    """Out, overwritten, in again to other units, and copied within the GPU: each rank has its own bytes of each row."""
    tp_size, layout = kind[1], layout_of(kind[1])
    fill(client, layout, tp_size)
    wanted = [[[array.copy() for array in row] for row in rows(client, layout, rank)] for rank in range(tp_size)]
    pages = [20, 3, 4, 17, 9, 0, 11, 5][: num_pages(layout)]
    client.submit(image(1, OUT, UNITS, pages))
    assert answers.wait(1)[0].error is None
    fill(client, layout, tp_size, -1)
    client.submit(image(2, IN, TARGETS, pages))
    result = answers.wait(2)[-1]
    num_bytes = sum(layout.unit_bytes(row) * len(units) for row, units in enumerate(UNITS, 1))
    assert result.error is None and [each.num_bytes for each in result.ranks] == [num_bytes] * tp_size
    client.submit(dataclasses.replace(task(3, COPY, [4, 1], [3, 5]), row=3))
    client.submit(dataclasses.replace(task(4, COPY, [0], [3]), row=1, num_tokens=2))
    assert [each.error for each in answers.wait(4)] == [None] * 4
    for rank in range(tp_size):
        for row, (old, new) in enumerate(zip(wanted[rank], rows(client, layout, rank), strict=True)):
            for before, now in zip(old, new, strict=True):
                assert np.array_equal(now, _expected(row, before)), f"rank {rank}, row {row}"


def _expected(row: int, before: np.ndarray) -> np.ndarray:
    """An array of a row: what came, in a field of -1, and what was copied within it."""
    expected = np.full_like(before, -1)
    if row:
        expected[TARGETS[row - 1]] = before[UNITS[row - 1]]
    if row == 3:
        expected[[3, 5]] = expected[[4, 1]]
    if row == 1:
        expected[3, :2] = expected[0, :2]
    return expected


def test_a_bad_image_is_that_tasks_failure_alone(
    client: TransferClient, answers: Answers, kind: tuple[str, int, str]
) -> None:
    """It says the row and its layer, copies nothing, and the rank that it met goes on."""
    layout, before = layout_of(kind[1]), [status.pid for status in client.statuses()]
    pages = list(range(num_pages(layout)))
    bad = [
        (image(1, IN, [[0], [NUM_UNITS], [1]], [0]), "units of the row 'state' (layer 2 is its first)"),
        (image(2, OUT, UNITS, pages[:-1]), "pages; it fills"),
        (image(3, OUT, UNITS[:2], pages), "an image has units of 2 rows; the layout has 3"),
        (dataclasses.replace(task(4, COPY, [0], [NUM_UNITS]), row=1), "units of the row 'window 10'"),
        (dataclasses.replace(task(5, COPY, [0], [1]), row=4), "a task of units of row 4"),
    ]
    for each, said in bad:
        client.submit(each)
        error = answers.wait(each.task_id)[-1].error
        assert error is not None and "DeviceError" in error and said in error
    client.submit(image(6, OUT, UNITS, pages))
    assert answers.wait(6)[-1].error is None
    assert [status.pid for status in client.statuses()] == before


@pytest.mark.processes
def test_a_load_is_taken_between_two_steps_of_an_image() -> None:
    """Of a rank that was stopped while both were sent: the small load behind the large image is answered first, and
    the image's progress word is told layer by layer up to the last."""
    layout = dataclasses.replace(LARGE.for_rank(1, 256), num_units=(4,))
    client, answers = RankClient(TransferConfig(tp_size=1), layout, 2, 64), Answers()
    client.start(answers)
    try:
        progress = client.layer_progress(0)
        assert progress is not None and layout.unit_bytes(1) == 64 * 2**20
        stopped(pids(client)[0])
        pages = list(range(-(-layout.unit_bytes(1) // layout.block_bytes)))
        client.submit(dataclasses.replace(task(1, IN, [], pages), units=(np.array([3], np.int32),)))
        client.submit(task(2, IN, [1], [60]))
        os.kill(pids(client)[0], signal.SIGCONT)
        assert progress.wait_layer((1,), layout.num_layers - 1, SECONDS)
        assert [(each.task.task_id, each.error) for each in answers.wait(2)] == [(2, None), (1, None)]
    finally:
        client.stop()
        client.__dict__.clear()
