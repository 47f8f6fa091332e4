"""The words of a rank's peer process in shared memory: how far the model's step is, and what is still to be read."""

from __future__ import annotations

from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.ipc.shared_signal import SharedSignal
from fastdeploy_cache.transfer_manager.kv.layout import MAX_LAYERS
from fastdeploy_cache.transfer_manager.kv.memory import SegmentHandle

NUM_PEER_SLOTS = 16  # peers whose layers in flight are counted apart; the last is for all others
_LAYER_BITS = 12
_STEP_MASK = 2 ** (32 - _LAYER_BITS) - 1
_STEP, _IN_FLIGHT = 0, 1


class PeerSignal:
    """One rank's words. The first is written by the model's worker, the others by the rank's peer process."""

    NUM_BYTES = 4 * (_IN_FLIGHT + NUM_PEER_SLOTS)

    def __init__(self, array: SharedArray) -> None:
        self.array = array
        self._signal = SharedSignal(array, self.NUM_BYTES // 4)

    def mark_layers(self, step: int, num_layers: int) -> None:
        """See `StepProgress.mark`."""
        self._signal.set(_STEP, (step & _STEP_MASK) << _LAYER_BITS | num_layers)

    @property
    def step_word(self) -> int:
        """Step and layers in one: as two words, a reader could pair the new step with the old one's layers."""
        return self._signal.get(_STEP)

    def wait_step(self, seen: int, timeout_seconds: float) -> int:
        """Sleep until the step's word is another than `seen`, or the time is over; the word."""
        word = self._signal.wait(_STEP, lambda value: value != seen, timeout_seconds)
        return seen if word is None else word

    def count_in_flight(self, slot: int, num_layers: int) -> None:
        """Peer process: layers of blocks that a peer has computed and that are not here yet."""
        self._signal.store(_IN_FLIGHT + slot, num_layers)

    def in_flight(self, slot: int) -> int:
        """See `count_in_flight`."""
        return self._signal.get(_IN_FLIGHT + slot)


def layers_done(word: int, step: int) -> int:
    """How many layers of this step the word says are done: 0 where it is of another step.

    A later step says nothing of an earlier one: that may have failed.
    """
    return word & (2**_LAYER_BITS - 1) if word >> _LAYER_BITS == step & _STEP_MASK else 0


class StepProgress:
    """A model worker's way to say how far its step is. One thread of one process for each rank."""

    def __init__(self, signal: PeerSignal) -> None:
        self._signal = signal

    @classmethod
    def open(cls, handle: bytes) -> StepProgress:
        """Open that of another process's rank, by what `PrefixCacheManager.step_progress(rank).handle()` gave there.

        Raises:
            IPCError: it is no handle, or the engine is gone or belongs to another user.
        """
        return cls(PeerSignal(SegmentHandle.attach(handle)))

    def handle(self) -> bytes:
        """What `open` takes in another process."""
        return SegmentHandle.share(self._signal.array)

    def mark(self, step: int, num_layers: int) -> None:
        """The first `num_layers` layers of step number `step` are computed, and their keys and values written.

        On a GPU: after the kernels have ended, not when they are launched. The bytes come before the word: x86-64
        keeps the order of stores; on aarch64 nothing but the interpreter's lock stands between them.

        Raises:
            LayoutError: a negative step, or a number of layers that cannot be.
        """
        if step < 0 or not 0 <= num_layers <= MAX_LAYERS:
            raise LayoutError(
                f"step {step} with {num_layers} layers marked; use 0 or more, and up to {MAX_LAYERS} layers"
            )
        self._signal.mark_layers(step, num_layers)
