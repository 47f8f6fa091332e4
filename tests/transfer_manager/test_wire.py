"""What an engine and its processes say to each other: a task, and its result, arrive as they were sent."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.transfer_manager.process.wire import (
    DoneMessage,
    FromProcess,
    ReadyMessage,
    StopMessage,
    TaskMessage,
    ToProcess,
)
from fastdeploy_cache.transfer_manager.task import Lane, RankResult, StoreNews, TaskKind, TransferTask

IDS = np.array([3, 1, 2], np.int32)
OUTWARD = {
    TaskKind.PUBLISH,
    TaskKind.SWAP_OUT,
    TaskKind.WRITE,
    TaskKind.CLEAR,
    TaskKind.SEND,
    TaskKind.UPDATE_SEND,
    TaskKind.WIPE,
    TaskKind.FORGET,
}


def task_of(kind: TaskKind) -> TransferTask:
    """A task in which no field has its default."""
    return TransferTask(
        task_id=2**40,
        kind=kind,
        source_ids=IDS,
        destination_ids=IDS[::-1],
        deadline=12.5,
        num_tokens=3,
        hashes=b"h" * 64,
        token_ids=b"t" * 8,
        priority=-1.0,
        detail=b"d",
    )


@pytest.mark.parametrize("kind", TaskKind)
def test_a_task_arrives_whole(kind: TaskKind) -> None:
    """Every field of every kind of task, in a message for one incarnation."""
    task = task_of(kind)
    message: ToProcess = decode(encode(TaskMessage(7, task)), ToProcess)
    assert isinstance(message, TaskMessage) and message.incarnation == 7
    for field in dataclasses.fields(task):
        sent, come = getattr(task, field.name), getattr(message.task, field.name)
        assert np.array_equal(come, sent) and type(come) is type(sent), field.name
    assert message.task.kind is kind


def test_a_result_arrives_whole() -> None:
    """Every field of a rank's answer, and the rank that it says it is."""
    result = RankResult(
        rank=1, num_bytes=2, num_blocks=3, seconds=4.0, error="e", was_tried=False, counts={"a": 5}, peer="p",
        news=StoreNews(1, 2, 3, b"came", b"gone", True),
    )  # fmt: skip
    message: FromProcess = decode(encode(DoneMessage(8, 9, result)), FromProcess)
    assert message == DoneMessage(8, 9, result)


@pytest.mark.parametrize("message", [ReadyMessage(1, Lane.OUT, b"report"), ReadyMessage(1, Lane.IN)])
def test_a_lane_says_that_it_is_ready(message: ReadyMessage) -> None:
    """With a report, and without one."""
    assert decode(encode(message), FromProcess) == message


def test_what_one_side_says_the_other_does_not() -> None:
    """A task or a stop from a process, and an answer to one, are refused."""
    for message in (TaskMessage(1, task_of(TaskKind.COPY)), StopMessage()):
        with pytest.raises(CodecError, match="type"):
            decode(encode(message), FromProcess)
    with pytest.raises(CodecError, match="type"):
        decode(encode(ReadyMessage(1, Lane.IN)), ToProcess)


def test_each_kind_says_what_it_needs() -> None:
    """Loads never queue behind copies down; only what ends a transfer goes to ranks beside one that is down."""
    assert {kind for kind in TaskKind if kind.lane is Lane.OUT} == OUTWARD
    assert {kind for kind in TaskKind if kind.is_swap} == {TaskKind.SWAP_IN, TaskKind.SWAP_OUT, TaskKind.COPY}
    assert {kind for kind in TaskKind if not kind.needs_all_ranks} == {TaskKind.UPDATE_SEND, TaskKind.END_RECEIVE}
    assert [kind for kind in TaskKind if kind.shows_layers] == [TaskKind.SWAP_IN]
    assert [kind for kind in TaskKind if kind.outlives_engine] == [TaskKind.WRITE, TaskKind.FORGET]
