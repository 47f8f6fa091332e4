"""The rank's transfer process: copies blocks between the tiers of its machine."""

from __future__ import annotations

from fastdeploy_cache.transfer_manager.device import open_device
from fastdeploy_cache.transfer_manager.device.base import copy_task
from fastdeploy_cache.transfer_manager.device.images import ImageMove
from fastdeploy_cache.transfer_manager.kv.memory import open_cpu_blocks
from fastdeploy_cache.transfer_manager.process.lane_task import Moved, Steps
from fastdeploy_cache.transfer_manager.process.lanes import LaneServer
from fastdeploy_cache.transfer_manager.process.main import serve_process
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.rank.setup import RankSetup
from fastdeploy_cache.transfer_manager.task import TransferTask


class CopyExecutor:
    """See `process.lane_task.Executor`. CPU blocks, and KV arrays of others, are never initialised here."""

    def __init__(self, setup: RankSetup, signal: RankSignal) -> None:
        """Attach to the engine's segments.

        Raises:
            IPCError: a segment is smaller than the set-up says.
            DeviceError: the device cannot be used.
        """
        self._signal = signal
        device = setup.device
        cpu = open_cpu_blocks(setup.cpu_fd, device.num_cpu_blocks, device.layout.block_bytes)
        self._opened = open_device(device, cpu)
        new_kv = self._opened.new_kv
        self.report = new_kv.to_bytes() if new_kv is not None else b""

    @property
    def is_lost(self) -> bool:
        return self._opened.device.is_lost

    def bind_thread(self) -> None:
        self._opened.device.bind_thread()

    def do(self, task: TransferTask) -> Moved | Steps:
        def on_layer(num_layers: int) -> None:
            if task.kind.shows_layers:
                self._signal.set_layers_done(task.task_id, num_layers)

        done = copy_task(self._opened.device, task, on_layer)
        return Moved(done) if isinstance(done, int) else self._steps(done)

    @staticmethod
    def _steps(moving: ImageMove) -> Steps:
        return Moved((yield from moving))

    def close(self) -> None:
        self._opened.device.close()


def main() -> int:
    """The process's entry."""
    return serve_process(RankSetup, lambda setup, signal: LaneServer(setup, signal, CopyExecutor(setup, signal)))
