"""What the engine shares with its ranks: their memory, and KV arrays that come and go."""

from __future__ import annotations

import os
from collections.abc import Callable

from fastdeploy_cache.errors import IPCError, LayoutError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.device.base import DeviceSetup
from fastdeploy_cache.transfer_manager.device.cpu import streaming_variables
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.kv.rank_kv import RankKV
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.process.owner import ProcessOwner
from fastdeploy_cache.transfer_manager.rank.memory import create_rank_memory
from fastdeploy_cache.transfer_manager.rank.setup import RankSetup
from fastdeploy_cache.transfer_manager.rank.transfer_client import ignore_kv_lost


class RankOwner(ProcessOwner):
    """See `process.owner.ProcessOwner`. The memory is taken by the constructor and given up by `close`."""

    def __init__(self, config: TransferConfig, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        self._config, self._layout = config, layout
        self._num_blocks = (num_gpu_blocks, num_cpu_blocks)
        self._makes_kv = config.owner_of_kv == "transfer"
        with_kv = config.owner_of_kv == "engine"
        self.memory = create_rank_memory(config.tp_size, layout, num_gpu_blocks, num_cpu_blocks, with_kv)
        self.signals = [each.signal for each in self.memory]
        self.kv = [RankKV(rank, layout, num_gpu_blocks, each.kv) for rank, each in enumerate(self.memory)]
        self._tell_kv_lost: Callable[[int], None] = ignore_kv_lost

    def listen(self, tell_kv_lost: Callable[[int], None]) -> None:
        """Have this called for a rank whose own arrays have gone, and again when it has new ones. Before the start."""
        self._tell_kv_lost = tell_kv_lost

    def spawn(self, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> ChildProcess:
        config, memory, (kv, kv_fds) = self._config, self.memory[rank], self.kv[rank].for_process()
        if kv is None and not self._makes_kv:
            raise IPCError("its KV arrays are gone")
        num_gpu_blocks, num_cpu_blocks = self._num_blocks
        setup = RankSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_fds=queue_fds,
            signal_fd=memory.signal.array.fd,
            heartbeat_seconds=config.heartbeat_seconds,
            variables=streaming_variables(os.environ) if config.device == "cpu" else {},
            cpu_fd=memory.cpu.fd,
            device=DeviceSetup(
                rank=rank,
                kind=config.device,
                device_id=config.device_id(rank),
                layout=self._layout,
                num_gpu_blocks=num_gpu_blocks,
                num_cpu_blocks=num_cpu_blocks,
                kv=kv,
            ),
        )
        return ChildProcess(setup, config, (*queue_fds, *kv_fds, memory.cpu.fd, memory.signal.array.fd))

    def may_run(self, rank: int) -> bool:
        return self._makes_kv or self.kv[rank].handle is not None

    def follow(self, rank: int) -> str | None:
        return self.kv[rank].follow()

    def take_report(self, rank: int, report: bytes, num_restarts: int) -> str | None:
        kv = self.kv[rank]
        if not report or kv.handle is not None:  # no arrays of its own; or the other lane has told them already
            return None
        try:
            kv.take(KVHandle.from_bytes(report))
        except (IPCError, LayoutError) as error:
            return f"its KV arrays cannot be taken: {error}"
        if num_restarts:  # what was computed since the old ones died is nowhere
            self._tell_kv_lost(rank)
        return None

    def note_up(self, rank: int) -> None:
        self.kv[rank].end_attaching()

    def note_death(self, rank: int, failure: str, *, is_blamed: bool) -> None:
        kv = self.kv[rank]
        if is_blamed:
            kv.end_attaching(failure)
        if self._makes_kv and kv.handle is not None:
            kv.drop()
            kv.sweep()
            self._tell_kv_lost(rank)

    def note_stopped(self) -> None:
        for kv in self.kv:
            kv.end_attaching("the ranks have been stopped")

    def close(self) -> None:
        for memory, kv in zip(self.memory, self.kv, strict=True):
            memory.close()
            kv.drop()
            kv.sweep()
