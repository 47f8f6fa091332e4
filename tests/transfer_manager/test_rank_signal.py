"""The words of one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from ipc.shared_array import SharedArray
from transfer_manager.rank_signal import RankSignal, RankState


@pytest.fixture
def array() -> Iterator[SharedArray]:
    """A segment of a signal's size."""
    segment = SharedArray.create("signal", RankSignal.NUM_BYTES)
    yield segment
    segment.close()


def test_words_do_not_touch_each_other(array: SharedArray) -> None:
    """State, heartbeat, tasks and progress are written and read on their own, through any mapping."""
    rank, engine = RankSignal(array), RankSignal(array)
    rank.state = RankState.READY
    rank.num_tasks_in_flight = 3
    rank.beat()
    rank.beat()
    assert (engine.state, engine.num_tasks_in_flight, engine.heartbeat) == (RankState.READY, 3, 2)
    engine.reset()
    assert (rank.state, rank.num_tasks_in_flight, rank.heartbeat) == (RankState.STARTING, 0, 0)


def test_progress_answers_for_its_own_task_only(array: SharedArray) -> None:
    """Another task's layers, earlier or later, do not let a waiter through."""
    signal = RankSignal(array)
    signal.set_layers_done(7, 12)
    assert signal.wait_layers(7, 12, 0) and signal.wait_layers(7, 1, 0)
    assert not signal.wait_layers(7, 13, 0)
    assert not signal.wait_layers(6, 1, 0) and not signal.wait_layers(8, 1, 0)
    signal.set_layers_done(8, 1)
    assert not signal.wait_layers(7, 1, 0), "what is overwritten is asked again of the task's result"
    assert signal.wait_layers(8, 1, 0) and not signal.wait_layers(8, 2, 0)


def test_a_task_number_of_any_size_keeps_its_layers(array: SharedArray) -> None:
    """Task numbers wrap inside the word; they never spill into the layer count."""
    signal = RankSignal(array)
    signal.set_layers_done(2**40 + 5, 4095)
    assert signal.wait_layers(2**40 + 5, 4095, 0)
    assert not signal.wait_layers(2**40 + 6, 0, 0)


def test_a_reset_lets_nobody_through(array: SharedArray) -> None:
    """Progress of a dead incarnation does not count for what its successor will do."""
    signal = RankSignal(array)
    signal.set_layers_done(3, 5)
    signal.reset()
    assert not signal.wait_layers(3, 1, 0)


def test_a_waiter_wakes_layer_by_layer(array: SharedArray) -> None:
    """A thread asleep on one layer returns when that layer, not an earlier one, is in."""
    signal, rank = RankSignal(array), RankSignal(array)
    arrived: list[bool] = []
    waiter = threading.Thread(target=lambda: arrived.append(signal.wait_layers(1, 3, 30)))
    waiter.start()
    rank.set_layers_done(1, 1)
    rank.set_layers_done(1, 2)
    assert not arrived
    rank.set_layers_done(1, 3)
    waiter.join(30)
    assert arrived == [True]
