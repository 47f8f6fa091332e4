"""The client to rank processes: what any thread may call."""

from __future__ import annotations

import threading

from fastdeploy_cache.errors import LayoutError, RankStartError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
from fastdeploy_cache.transfer_manager.kv.rank_kv import Attaching
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks
from fastdeploy_cache.transfer_manager.process.client import Processes
from fastdeploy_cache.transfer_manager.process.owner import ProcessKind
from fastdeploy_cache.transfer_manager.process.supervisor import Phase, RankSupervisor
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress
from fastdeploy_cache.transfer_manager.rank.memory import release_pages, retake_pages
from fastdeploy_cache.transfer_manager.rank.owner import RankOwner
from fastdeploy_cache.transfer_manager.rank.transfer_client import KVArrays, OnKVLost, ignore_kv_lost


class RankClient:
    """See `rank.transfer_client.TransferClient`.

    The memory is taken by the constructor and given up by `stop`. Everything else is done by the I/O thread.
    """

    def __init__(
        self,
        config: TransferConfig,
        layout: RankLayout,
        num_gpu_blocks: int,
        num_cpu_blocks: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._config = config
        self._owner = RankOwner(config, layout, num_gpu_blocks, num_cpu_blocks)
        self._memory = self._owner.memory
        self._processes = own = Processes(config, ProcessKind(name="transfer"), self._owner, clock)
        self.submit, self.cancel, self.has_room = own.submit, own.cancel, own.has_room
        self.wait_ready, self.statuses, self.restart, self.stop = own.wait_ready, own.statuses, own.restart, own.stop
        self._attach_lock, self._clock = threading.Lock(), clock

    def start(self, on_result: OnResult, on_kv_lost: OnKVLost = ignore_kv_lost) -> None:
        config, callbacks = self._config, Callbacks(on_result)
        self._owner.listen(lambda rank: callbacks.call(lambda: on_kv_lost(rank)))
        # the thread ends the start itself at its deadline and then needs time to reap
        io = self._processes.start(callbacks, config.start_timeout_seconds + config.stop_timeout_seconds + 5)
        if io.start_failure is not None or not self._processes.is_open or not io.started.is_set():
            self.stop()
            raise RankStartError(io.start_failure or "the ranks did not start within their deadline")

    @property
    def available(self) -> bool:
        return self._processes.available

    # -- KV arrays

    def kv_views(self, rank: int) -> KVViews:
        return self._owner.kv[rank].mapped().views()

    def kv_handle(self, rank: int) -> KVHandle:
        return self._owner.kv[rank].for_worker()

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        self._check_owner("are attached")
        if not isinstance(kv, KVHandle):
            raise LayoutError("a rank process needs a KVHandle: make the arrays over a KVMemory, or on a GPU export_kv")
        supervisor, mine = self._supervisor(rank), self._owner.kv[rank]
        if supervisor.phase is Phase.OFF:
            raise RankStartError(f"rank {rank} is switched off: {supervisor.last_failure}")
        with self._attach_lock:  # of two callers at once, the second must find the arrays of the first
            if not self._processes.is_open:
                raise RankStartError("the ranks have been stopped")
            if mine.handle is not None:
                raise LayoutError(f"rank {rank} has KV arrays attached; call kv_lost first")
            mine.take(kv)
            waiting = mine.attaching = Attaching(self._clock.event())
        self._processes.note_change(rank)
        in_time = waiting.done.wait(self._config.start_timeout_seconds + self._config.stop_timeout_seconds)
        if not in_time or waiting.error is not None:
            self.kv_lost(rank)
            why = waiting.error or supervisor.shortage or "it was too late"
            raise RankStartError(f"rank {rank} cannot attach its KV arrays: {why}")

    def kv_lost(self, rank: int) -> None:
        self._check_owner("can be lost")
        self._owner.kv[rank].drop()
        self._processes.note_change(rank)

    def _check_owner(self, what: str) -> None:
        if (owner := self._config.owner_of_kv) != "worker":
            raise LayoutError(f"transfer.kv_owner is {owner!r}; only a worker's KV arrays {what}")

    def _supervisor(self, rank: int) -> RankSupervisor:
        if self._processes.io is None:
            raise LayoutError("the ranks are not started")
        return self._processes.io.ranks[rank]

    # -- memory

    def layer_progress(self, rank: int) -> LayerProgress | None:
        return LayerProgress(self._owner.signals[rank])

    def cpu_segments(self) -> list[SharedArray]:
        return [memory.cpu for memory in self._memory]

    def release_memory(self, *, gpu: bool, cpu: bool) -> int:
        pinned = self._config.device == "cuda"  # host memory that CUDA has locked: other pages would come back
        return release_pages(self._memory, gpu=gpu, cpu=cpu and not pinned)

    def retake_memory(self) -> None:
        retake_pages(self._memory)
