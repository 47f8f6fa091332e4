"""The words that a rank and its engine show each other in shared memory; each word has one writer."""

from __future__ import annotations

import os
import time
from enum import IntEnum

from fastdeploy_cache.ipc.codec import decode, encode
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shared_signal import SharedSignal
from fastdeploy_cache.transfer_manager.kv.memory import SegmentHandle

NUM_SLOTS = 512  # loads whose progress is remembered, and tasks whose cancelling is; more than can be in flight
_LAYER_BITS = 12
_FAILED = 2**_LAYER_BITS - 1
_TASK_MASK = 2 ** (32 - _LAYER_BITS) - 1


class RankState(IntEnum):
    """What a rank's process is doing."""

    STARTING = 0
    READY = 1
    STOPPING = 2


class _Word(IntEnum):
    STATE = 0
    HEARTBEAT = 1
    TASKS_IN_FLIGHT = 2  # one for each lane
    PROGRESS = 4  # a slot for each of the last loads: written by the rank, and by the engine once the rank is reaped
    CANCELLED = 4 + NUM_SLOTS  # a slot for each of the last tasks: written by the engine


class RankSignal:
    """One rank's words. Readers may be any thread of any process."""

    NUM_BYTES = 4 * (_Word.CANCELLED + NUM_SLOTS)

    def __init__(self, array: SharedArray) -> None:
        self._array = array
        self._signal = SharedSignal(array, self.NUM_BYTES // 4)

    def reset(self) -> None:
        """Called by the engine between two incarnations, when no rank writes. Progress stays: some may still wait."""
        for word in range(_Word.PROGRESS):
            self._signal.set(word, 0)

    @property
    def state(self) -> RankState:
        """The rank's own word for what it is doing."""
        return RankState(self._signal.get(_Word.STATE))

    @state.setter
    def state(self, state: RankState) -> None:
        self._signal.set(_Word.STATE, state)

    @property
    def heartbeat(self) -> int:
        """A counter that moves while the process runs."""
        return self._signal.get(_Word.HEARTBEAT)

    def beat(self) -> None:
        """Move the counter."""
        self._signal.store(_Word.HEARTBEAT, self.heartbeat + 1)

    @property
    def num_tasks_in_flight(self) -> int:
        """Tasks taken from the queue and not yet answered."""
        return self._signal.get(_Word.TASKS_IN_FLIGHT) + self._signal.get(_Word.TASKS_IN_FLIGHT + 1)

    def set_busy(self, lane: int, busy: bool) -> None:
        """Say whether a lane works on a task."""
        self._signal.store(_Word.TASKS_IN_FLIGHT + lane, int(busy))

    # -- loads, layer by layer

    def set_layers_done(self, task_id: int, num_layers: int) -> None:
        """Say that the first `num_layers` layers of a load are in.

        Task and count share one word: as two, a waiter could pair the new task's number with the old one's count. The
        bytes come before the word: a waiter that sees the count sees the layers. x86-64 keeps the order of stores; on
        aarch64 nothing but the interpreter's lock, taken again after the copy, stands between them.
        """
        self._set_progress(task_id, num_layers)

    def set_failed(self, task_id: int) -> None:
        """Say that a load will not come (any further): its waiters give up."""
        self._set_progress(task_id, _FAILED)

    def _set_progress(self, task_id: int, value: int) -> None:
        self._signal.set(_Word.PROGRESS + task_id % NUM_SLOTS, (task_id & _TASK_MASK) << _LAYER_BITS | value)

    def set_begun(self, task_id: int) -> None:
        """Engine, before the rank hears of it: a load that no other of its slot is in flight beside."""
        self._set_progress(task_id, 0)

    def wait_layers(self, task_id: int, num_layers: int, timeout_seconds: float) -> bool:
        """Sleep until the first `num_layers` layers of that load are in; False at its failure or when the time is over.

        Also False where the slot is another load's: this one has ended long ago, or was refused. Source: futex wait.
        """
        wanted = task_id & _TASK_MASK

        def decided(word: int) -> bool:
            return bool(word >> _LAYER_BITS != wanted or word & (2**_LAYER_BITS - 1) >= num_layers)

        word = self._signal.wait(_Word.PROGRESS + task_id % NUM_SLOTS, decided, timeout_seconds)
        return word is not None and word >> _LAYER_BITS == wanted and word & (2**_LAYER_BITS - 1) != _FAILED

    # -- tasks that nobody wants any more

    def cancel(self, task_id: int) -> None:
        """Engine: the rank need not begin this task."""
        self._signal.store(_Word.CANCELLED + task_id % NUM_SLOTS, task_id + 1)  # 0 is no task

    def is_cancelled(self, task_id: int) -> bool:
        """Rank: whether to leave this task out."""
        return self._signal.get(_Word.CANCELLED + task_id % NUM_SLOTS) == (task_id + 1) & (2**32 - 1)

    def handle(self) -> bytes:
        """For `LayerProgress.open` in another process, as long as this one lives."""
        return encode(SegmentHandle.of(self.NUM_BYTES, self._array.fd, os.getpid()))


class LayerProgress:
    """A model worker's view of its rank's loads. Any thread of any process of the same user."""

    def __init__(self, signal: RankSignal) -> None:
        self._signal = signal

    @classmethod
    def open(cls, handle: bytes) -> LayerProgress:
        """Of another process's rank, by what `PrefixCacheManager.layer_progress(rank).handle()` gave there.

        Raises:
            IPCError: it is no handle, or the engine is gone or belongs to another user.
        """
        segment: SegmentHandle = decode(handle, SegmentHandle)
        return cls(RankSignal(SharedArray(segment.open_fd(), segment.num_bytes)))

    def handle(self) -> bytes:
        """What `open` takes in another process."""
        return self._signal.handle()

    def wait_layer(self, load_ids: tuple[int, ...], layer: int, timeout_seconds: float) -> bool:
        """Sleep until layer number `layer` (from 0) of all these loads is in: the worker may compute it.

        `load_ids` come from `Match.load_ids`. False when one has failed, was cancelled, or the time is over: then the
        worker still finishes its step, and the engine discards it (see `PrefixCacheManager.allocate`).
        """
        deadline = time.monotonic() + timeout_seconds
        return all(
            self._signal.wait_layers(load_id, layer + 1, max(0.0, deadline - time.monotonic())) for load_id in load_ids
        )
