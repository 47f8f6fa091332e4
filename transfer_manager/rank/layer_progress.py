"""How far a rank's loads are, for the model's worker that computes behind them."""

from __future__ import annotations

from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, seconds_to_wait
from fastdeploy_cache.transfer_manager.kv.memory import SegmentHandle
from fastdeploy_cache.transfer_manager.process.words import RankSignal


class LayerProgress:
    """A model worker's view of its rank's loads. Any thread of any process of the same user."""

    def __init__(self, signal: RankSignal) -> None:
        self._signal = signal

    @classmethod
    def open(cls, handle: bytes) -> LayerProgress:
        """Open that of another process's rank, by what `PrefixCacheManager.layer_progress(rank).handle()` gave there.

        Raises:
            IPCError: it is no handle, or the engine is gone or belongs to another user.
        """
        return cls(RankSignal(SegmentHandle.attach(handle)))

    def handle(self) -> bytes:
        """What `open` takes in another process."""
        return SegmentHandle.share(self._signal.array)

    def wait_layer(self, load_ids: tuple[int, ...], layer: int, timeout_seconds: float) -> bool:
        """Sleep until layer number `layer` (from 0) of all these loads is in: the worker may compute it.

        `load_ids` come from `Match.load_ids`. False when one has failed, was cancelled, or the time is over: then the
        worker still finishes its step, and the engine discards it (see `PrefixCacheManager.allocate`).
        """
        deadline = SYSTEM_CLOCK.now() + seconds_to_wait("wait_layer", timeout_seconds)
        return all(
            self._signal.wait_layers(load_id, layer + 1, max(0.0, deadline - SYSTEM_CLOCK.now()))
            for load_id in load_ids
        )
