"""The words that a rank shows in shared memory; the rank is their only writer while it lives."""

from __future__ import annotations

from enum import IntEnum

from ipc.shared_array import SharedArray
from ipc.shared_signal import SharedSignal

_LAYER_BITS = 12
_TASK_MASK = 2 ** (32 - _LAYER_BITS) - 1


class RankState(IntEnum):
    """What a rank's process is doing."""

    STARTING = 0
    READY = 1
    STOPPING = 2


class _Word(IntEnum):
    STATE = 0
    HEARTBEAT = 1
    TASKS_IN_FLIGHT = 2
    LAYER_PROGRESS = 3


class RankSignal:
    """One rank's words. Readers may be any thread of any process."""

    NUM_BYTES = 4 * len(_Word)

    def __init__(self, array: SharedArray) -> None:
        self._signal = SharedSignal(array, len(_Word))

    def reset(self) -> None:
        """Called by the engine between two incarnations, when no rank writes."""
        for word in _Word:
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
        self._signal.set(_Word.HEARTBEAT, self.heartbeat + 1)

    @property
    def num_tasks_in_flight(self) -> int:
        """Tasks taken from the queue and not yet answered."""
        return self._signal.get(_Word.TASKS_IN_FLIGHT)

    @num_tasks_in_flight.setter
    def num_tasks_in_flight(self, num_tasks: int) -> None:
        self._signal.set(_Word.TASKS_IN_FLIGHT, num_tasks)

    def set_layers_done(self, task_id: int, num_layers: int) -> None:
        """Say that the first `num_layers` layers of a load are in.

        Task and count share one word: as two, a waiter could pair the new task's number with the old one's count.
        """
        self._signal.set(_Word.LAYER_PROGRESS, (task_id & _TASK_MASK) << _LAYER_BITS | num_layers)

    def wait_layers(self, task_id: int, num_layers: int, timeout_seconds: float) -> bool:
        """Sleep until the first `num_layers` layers of that task are in; False when the time is over first.

        Source: futex wait on the progress word. A later task's progress does not answer for this one.
        """
        wanted = task_id & _TASK_MASK

        def arrived(word: int) -> bool:
            return bool(word >> _LAYER_BITS == wanted and word & (2**_LAYER_BITS - 1) >= num_layers)

        return self._signal.wait(_Word.LAYER_PROGRESS, arrived, timeout_seconds) is not None
