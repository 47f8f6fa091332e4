"""The words that a rank and its engine show each other in shared memory; each word has one writer."""

from __future__ import annotations

from enum import IntEnum

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shared_signal import SharedSignal
from fastdeploy_cache.transfer_manager.task import Lane

NUM_SLOTS = 512  # loads whose progress is remembered, and tasks whose cancelling is; more than can be in flight
_LAYER_BITS = 12
_FAILED = 2**_LAYER_BITS - 1
_TASK_MASK = 2 ** (32 - _LAYER_BITS) - 1
_WORD = 2**32 - 1


class RankState(IntEnum):
    """What a rank's process is doing."""

    STARTING = 0
    READY = 1
    STOPPING = 2


class _Word(IntEnum):
    STATE = 0
    HEARTBEAT = 1
    AT_WORK = 2  # one for each lane
    PROGRESS = 4  # a slot for each of the last loads: written by the rank, and by the engine once the rank is reaped
    CANCELLED = 4 + NUM_SLOTS  # a slot for each of the last tasks: written by the engine


class RankSignal:
    """One rank's words. Readers may be any thread of any process."""

    NUM_BYTES = 4 * (_Word.CANCELLED + NUM_SLOTS)

    def __init__(self, array: SharedArray) -> None:
        self.array = array
        self._signal = SharedSignal(array, self.NUM_BYTES // 4)

    @classmethod
    def create(cls, name: str) -> RankSignal:
        """Engine: the words of a new process, in memory of its own."""
        return cls(SharedArray.create(name, cls.NUM_BYTES))

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
    def num_busy_lanes(self) -> int:
        """Lanes that have taken a task from the queue and not yet answered it."""
        return sum(self._signal.get(_Word.AT_WORK + lane) != 0 for lane in Lane)

    def set_busy(self, lane: int, task_id: int | None) -> None:
        """Say which task a lane works on."""
        self._signal.store(_Word.AT_WORK + lane, 0 if task_id is None else task_id + 1)

    def is_at(self, lane: int, task_id: int) -> bool:
        """Whether a lane works on this very task; or did, when the rank died."""
        return self._signal.get(_Word.AT_WORK + lane) == (task_id + 1) & _WORD

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
        return self._signal.get(_Word.CANCELLED + task_id % NUM_SLOTS) == (task_id + 1) & _WORD
