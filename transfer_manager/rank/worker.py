"""The rank's transfer process: copies blocks between the tiers of its machine."""

from __future__ import annotations

from fastdeploy_cache.transfer_manager.device import open_device
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer, Moved, open_cpu_blocks, serve_process
from fastdeploy_cache.transfer_manager.rank.rank_signal import RankSignal
from fastdeploy_cache.transfer_manager.task import RankSetup, TaskKind, TaskMessage, unpack_ids


class CopyExecutor:
    """See `transfer_manager.lanes.Executor`. CPU blocks, and KV arrays of others, are never initialised here."""

    needs_token_ids = False

    def __init__(self, setup: RankSetup, signal: RankSignal) -> None:
        """Attach to the engine's segments.

        Raises:
            IPCError: a segment is smaller than the set-up says.
            DeviceError: the device cannot be used.
        """
        self._signal = signal
        self._opened = open_device(setup, open_cpu_blocks(setup.cpu_fd, setup.num_cpu_blocks, setup.layout.block_bytes))
        self.new_kv = self._opened.new_kv

    @property
    def is_lost(self) -> bool:
        return self._opened.device.is_lost

    def bind_thread(self) -> None:
        self._opened.device.bind_thread()

    def do(self, task: TaskMessage) -> Moved:
        def on_layer(num_layers: int) -> None:
            if task.kind is TaskKind.SWAP_IN:
                self._signal.set_layers_done(task.task_id, num_layers)

        sources, destinations = unpack_ids(task.source_ids), unpack_ids(task.destination_ids)
        return Moved(self._opened.device.copy(task.kind, sources, destinations, on_layer, task.num_tokens))

    def close(self) -> None:
        self._opened.device.close()


def main() -> int:
    """The process's entry."""
    return serve_process(RankSetup, lambda setup, signal: LaneServer(setup, signal, CopyExecutor(setup, signal)))
