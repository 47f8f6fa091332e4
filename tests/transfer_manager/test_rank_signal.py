"""The words of one rank."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.kv.layout import MAX_LAYERS
from fastdeploy_cache.transfer_manager.process.words import NUM_SLOTS, RankSignal, RankState
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress


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
    rank.set_busy(0, 7)
    rank.set_busy(1, 0)
    rank.beat()
    rank.beat()
    assert (engine.state, engine.num_busy_lanes, engine.heartbeat) == (RankState.READY, 2, 2)
    engine.reset()
    assert (rank.state, rank.num_busy_lanes, rank.heartbeat) == (RankState.STARTING, 0, 0)


def test_progress_answers_for_its_own_task_only(array: SharedArray) -> None:
    """Another task's layers, earlier or later, do not let a waiter through; many loads have their progress at once."""
    signal = RankSignal(array)
    signal.set_layers_done(7, 12)
    assert signal.wait_layers(7, 12, 0) and signal.wait_layers(7, 1, 0)
    assert not signal.wait_layers(7, 13, 0)
    assert not signal.wait_layers(6, 1, 0) and not signal.wait_layers(8, 1, 0)
    signal.set_layers_done(8, 1)
    assert signal.wait_layers(7, 1, 0) and signal.wait_layers(8, 1, 0) and not signal.wait_layers(8, 2, 0)


def test_a_load_whose_slot_was_taken_is_given_up_at_once(array: SharedArray) -> None:
    """Of so many loads that the oldest one's word was overwritten, that one answers False without waiting; so does one
    that was never begun, however large its number."""
    signal = RankSignal(array)
    signal.set_layers_done(7, 12)
    signal.set_layers_done(7 + NUM_SLOTS, 1)
    assert not signal.wait_layers(7, 1, 3600)
    assert signal.wait_layers(7 + NUM_SLOTS, 1, 0)
    assert not signal.wait_layers(600_000, 1, 3600)


def test_a_failed_load_lets_its_waiters_go(array: SharedArray) -> None:
    """Asleep or not yet, for layers that were in or not: False, at once."""
    signal, engine = RankSignal(array), RankSignal(array)
    signal.set_layers_done(3, 2)
    arrived: list[bool] = []
    waiter = threading.Thread(target=lambda: arrived.append(signal.wait_layers(3, 3, 30)))
    waiter.start()
    engine.set_failed(3)
    waiter.join(30)
    assert arrived == [False] and not signal.wait_layers(3, 1, 3600)


def test_a_task_number_of_any_size_keeps_its_layers(array: SharedArray) -> None:
    """Task numbers wrap inside the word; they never spill into the layer count."""
    signal = RankSignal(array)
    signal.set_layers_done(2**40 + 5, MAX_LAYERS)
    assert signal.wait_layers(2**40 + 5, MAX_LAYERS, 0)
    assert not signal.wait_layers(2**40 + 6, 0, 0)


def test_cancelling_is_of_one_task(array: SharedArray) -> None:
    """The rank sees the number that the engine wrote, and no other; nothing is cancelled at first."""
    rank, engine = RankSignal(array), RankSignal(array)
    assert not any(rank.is_cancelled(task_id) for task_id in range(2 * NUM_SLOTS))
    engine.cancel(5)
    assert [task_id for task_id in range(2 * NUM_SLOTS) if rank.is_cancelled(task_id)] == [5]


def test_a_worker_follows_its_rank_by_handle(array: SharedArray) -> None:
    """`LayerProgress` is opened from bytes, as in another process, and waits for all of several loads."""
    signal = RankSignal(array)
    progress = LayerProgress.open(LayerProgress(signal).handle())
    signal.set_layers_done(1, 2)
    signal.set_layers_done(2, 1)
    assert progress.wait_layer((1, 2), 0, 0) and progress.wait_layer((), 7, 0)
    assert not progress.wait_layer((1, 2), 1, 0)


def test_a_waiter_wakes_layer_by_layer(array: SharedArray) -> None:
    """A thread asleep on one layer returns when that layer, not an earlier one, is in."""
    signal, rank = RankSignal(array), RankSignal(array)
    arrived: list[bool] = []
    signal.set_begun(1)
    waiter = threading.Thread(target=lambda: arrived.append(signal.wait_layers(1, 3, 30)))
    waiter.start()
    rank.set_layers_done(1, 1)
    rank.set_layers_done(1, 2)
    assert not arrived
    rank.set_layers_done(1, 3)
    waiter.join(30)
    assert arrived == [True]
