"""The client to rank processes: what any thread may call."""

from __future__ import annotations

import os
import threading

from fastdeploy_cache.errors import IPCError, LayoutError, RankStartError
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import KVArrays, OnKVLost, OnResult, ignore_kv_lost
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
from fastdeploy_cache.transfer_manager.process.child import RankProcess
from fastdeploy_cache.transfer_manager.process.client import ProcessClient
from fastdeploy_cache.transfer_manager.process.io_thread import RankIO
from fastdeploy_cache.transfer_manager.process.supervisor import Phase, RankSupervisor
from fastdeploy_cache.transfer_manager.rank.kv import Attaching, RankKV
from fastdeploy_cache.transfer_manager.rank.memory import create_rank_memory, release_pages, retake_pages
from fastdeploy_cache.transfer_manager.rank.rank_signal import LayerProgress
from fastdeploy_cache.transfer_manager.task import RankSetup


class RankClient(ProcessClient):
    """See `transfer_manager.client.TransferClient`.

    The memory is taken by the constructor and given up by `stop`. Everything else is done by the thread of `RankIO`.
    """

    def __init__(self, config: TransferConfig, layout: RankLayout, num_gpu_blocks: int, num_cpu_blocks: int) -> None:
        super().__init__(config)
        self._layout = layout
        self._num_blocks = (num_gpu_blocks, num_cpu_blocks)
        owns_kv = config.owner_of_kv == "engine"
        self._memory = create_rank_memory(config.tp_size, layout, num_gpu_blocks, num_cpu_blocks, owns_kv)
        self._kv = [RankKV(rank, layout, num_gpu_blocks, memory.kv) for rank, memory in enumerate(self._memory)]
        self._attach_lock = threading.Lock()

    def start(self, on_result: OnResult, on_kv_lost: OnKVLost = ignore_kv_lost) -> None:
        config = self._config
        io = RankIO(
            config,
            spawn=self._spawn,
            memory=self._memory,
            kv=self._kv,
            on_result=on_result,
            on_kv_lost=on_kv_lost,
        )
        # the thread ends the start itself at its deadline and then needs time to reap
        self._start_io(io, on_result, config.start_timeout_seconds + config.stop_timeout_seconds + 5)
        if io.start_failure is not None or not io.open or not io.started.is_set():
            self.stop()
            raise RankStartError(io.start_failure or "the ranks did not start within their deadline")

    def cancel(self, task_id: int) -> None:
        for memory in self._memory:
            memory.signal.cancel(task_id)

    def kv_views(self, rank: int) -> KVViews:
        return self._kv[rank].mapped().views()

    def kv_handle(self, rank: int) -> KVHandle:
        return self._kv[rank].for_worker()

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        if self._config.owner_of_kv != "worker":
            raise LayoutError(
                f"transfer.kv_owner is {self._config.owner_of_kv!r}; only a worker's KV arrays are attached"
            )
        if not isinstance(kv, KVHandle):
            raise LayoutError("a rank process needs a KVHandle: make the arrays over a KVMemory, or on a GPU export_kv")
        supervisor, mine = self._supervisor(rank), self._kv[rank]
        if supervisor.phase is Phase.OFF:
            raise RankStartError(f"rank {rank} is switched off: {supervisor.last_failure}")
        with self._attach_lock:
            if not self._io_is_open():
                raise RankStartError("the ranks have been stopped")
            if mine.handle is not None:
                raise LayoutError(f"rank {rank} has KV arrays attached; call kv_lost first")
            mine.take(kv)
            waiting = mine.attaching = Attaching()
        self._tell_kv_changed(rank)
        in_time = waiting.done.wait(self._config.start_timeout_seconds + self._config.stop_timeout_seconds)
        if not in_time or waiting.error is not None:
            self.kv_lost(rank)
            raise RankStartError(f"rank {rank} cannot attach its KV arrays: {waiting.error or 'it was too late'}")

    def kv_lost(self, rank: int) -> None:
        if self._config.owner_of_kv != "worker":
            raise LayoutError(
                f"transfer.kv_owner is {self._config.owner_of_kv!r}; only a worker's KV arrays can be lost"
            )
        self._kv[rank].drop()
        self._tell_kv_changed(rank)

    def _io_is_open(self) -> bool:
        return self._io is not None and self._io.open

    def _supervisor(self, rank: int) -> RankSupervisor:
        if self._io is None:
            raise LayoutError("the ranks are not started")
        return self._io.ranks[rank]

    def layer_progress(self, rank: int) -> LayerProgress | None:
        return LayerProgress(self._memory[rank].signal)

    def _spawn(self, rank: int, incarnation: int, queue_address: str) -> RankProcess:
        config, memory, (kv, kv_fds) = self._config, self._memory[rank], self._kv[rank].for_process()
        if kv is None and config.owner_of_kv != "transfer":
            raise IPCError("its KV arrays are gone")
        num_gpu_blocks, num_cpu_blocks = self._num_blocks
        setup = RankSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_address=queue_address,
            device=config.device,
            device_id=config.device_id(rank),
            layout=self._layout,
            num_gpu_blocks=num_gpu_blocks,
            num_cpu_blocks=num_cpu_blocks,
            kv=kv,
            cpu_fd=memory.cpu.fd,
            signal_fd=memory.signal_array.fd,
            heartbeat_seconds=config.heartbeat_seconds,
            max_tasks_in_flight=config.max_tasks_in_flight,
        )
        return RankProcess(setup, config, (*kv_fds, memory.cpu.fd, memory.signal_array.fd))

    def cpu_segments(self) -> list[SharedArray]:
        return [memory.cpu for memory in self._memory]

    def release_memory(self, *, gpu: bool, cpu: bool) -> int:
        pinned = self._config.device == "cuda"  # host memory that CUDA has locked: other pages would come back
        return release_pages(self._memory, gpu=gpu, cpu=cpu and not pinned)

    def retake_memory(self) -> None:
        retake_pages(self._memory)

    def _close_memory(self) -> None:
        for memory, kv in zip(self._memory, self._kv, strict=True):
            memory.close()
            kv.drop()
            kv.sweep()
