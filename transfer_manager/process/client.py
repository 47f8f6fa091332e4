"""What clients to processes of ranks have in common: any thread hands tasks to the I/O thread and stops it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.flights import failed
from fastdeploy_cache.transfer_manager.process.io_thread import RankIO
from fastdeploy_cache.transfer_manager.process.supervisor import Phase
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

logger = event_log(__name__)

_RESTART_BACKOFF_SECONDS = (
    0.5  # doubles with each death in a minute, so up to half a minute: what it needs may come back
)
_NEVER_GIVE_UP = 10**6


def config_beside(transfer: TransferConfig, **changes: Any) -> TransferConfig:
    """Of processes beside the ranks' own, which the engine can do without: they are started again and again."""
    return dataclasses.replace(
        transfer,
        device="cpu",
        device_ids=(),
        max_restarts=_NEVER_GIVE_UP,
        restart_window_seconds=TransferConfig.restart_window_seconds,
        restart_backoff_seconds=_RESTART_BACKOFF_SECONDS,
        max_tasks_in_flight=TransferConfig.max_tasks_in_flight,
        **{"kv_owner": None, **changes},
    )


class ProcessClient:
    """Owns the thread of a `RankIO`; subclasses say what the processes are."""

    _io: RankIO | None = None
    _thread: threading.Thread | None = None
    _on_result: OnResult

    def __init__(self, config: TransferConfig) -> None:
        self._config = config
        self._stop_lock = threading.Lock()

    def _start_io(self, io: RankIO, on_result: OnResult, timeout_seconds: float) -> None:
        """Start the thread and wait until the processes have, or the time is over."""
        self._io, self._on_result = io, on_result
        self._thread = threading.Thread(target=io.run, name="transfer-io", daemon=True)
        self._thread.start()
        try:
            io.started.wait(timeout_seconds)
        except BaseException:  # Ctrl-C: nobody will get to call stop
            self.stop()
            raise

    def submit(self, task: TransferTask) -> None:
        """See `TransferClient`."""
        io = self._io
        assert io is not None, "submit before start"
        with io.lock:
            accepted = self.has_room(task.kind) and io.take_slot(task)
            if accepted:
                io.num_tasks[task.kind.lane] += 1
                io.outbox.append(task)
        if accepted:
            io.wakeup.set()
        else:
            self._on_result(failed(task, self._config.tp_size, "the ranks cannot take a task now"))

    @property
    def available(self) -> bool:
        """See `TransferClient`."""
        return self._io is not None and self._io.open and self._io.all_ready.is_set()

    def has_room(self, kind: TaskKind) -> bool:
        """See `TransferClient`."""
        io = self._io
        if io is None or not (self.available or (io.open and not kind.needs_all_ranks)):
            return False
        return io.num_tasks[kind.lane] < self._config.max_tasks_in_flight

    def wait_ready(self, timeout_seconds: float) -> bool:
        """See `TransferClient`."""
        return self._io is not None and self._io.all_ready.wait(timeout_seconds)

    def statuses(self) -> list[RankStatus]:
        """See `TransferClient`."""
        return [
            RankStatus(
                rank=r.rank,
                up=r.phase is Phase.READY,
                num_restarts=r.num_restarts,
                pid=process.pid if (process := r.process) is not None else None,
            )
            for r in (self._io.ranks if self._io is not None else [])
        ]

    def stop(self) -> None:
        """See `TransferClient`."""
        if self._io is not None:
            self._io.stopping = True
            self._io.wakeup.set()
        if threading.current_thread() is self._thread:
            return  # by a callback: the thread ends once that has returned, and whoever stops it next clears up
        with self._stop_lock:  # of two callers the second waits for the first
            if self._thread is not None:
                self._thread.join(self._config.stop_timeout_seconds + 10)
                if self._thread.is_alive():
                    logger.error("event=io_thread_stuck action=leave_it_what_it_uses")  # in the caller's callback
                    return
                self._thread = None
            if self._io is not None:
                self._io.wakeup.close()
            self._close_memory()

    def _tell_kv_changed(self, rank: int) -> None:
        """A rank's KV arrays have come or gone."""
        io = self._io
        assert io is not None
        with io.lock:
            io.changed_kv.add(rank)
            io.all_ready.clear()  # at once, so that no task begins meanwhile; the I/O thread sets it
        io.wakeup.set()

    def _close_memory(self) -> None:
        """Give up what the processes shared; they are gone."""
        raise NotImplementedError
