"""The processes of one kind, as any thread uses them: it hands tasks to the I/O thread, and stops it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.transfer_manager.client import RankStatus
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks
from fastdeploy_cache.transfer_manager.process.flights import failed
from fastdeploy_cache.transfer_manager.process.io_thread import ProcessIO
from fastdeploy_cache.transfer_manager.process.owner import ProcessKind, ProcessOwner
from fastdeploy_cache.transfer_manager.process.supervisor import Phase
from fastdeploy_cache.transfer_manager.task import TaskKind, TransferTask

logger = event_log(__name__)

# doubles with each death in a minute, so up to half a minute: what it needs may come back
_RESTART_BACKOFF_SECONDS = 0.5
_NEVER_GIVE_UP = 10**6
_CALLBACK_SECONDS = 10.0  # beyond the time that processes have to stop, for the callbacks that tell of it


def config_beside(transfer: TransferConfig, **changes: Any) -> TransferConfig:
    """Settings of processes beside the ranks' own, which the engine can do without: they start again and again."""
    return dataclasses.replace(
        transfer,
        device="cpu",
        device_ids=(),
        kv_owner=None,
        max_restarts=_NEVER_GIVE_UP,
        restart_window_seconds=TransferConfig.restart_window_seconds,
        restart_backoff_seconds=_RESTART_BACKOFF_SECONDS,
        max_tasks_in_flight=TransferConfig.max_tasks_in_flight,
        **changes,
    )


class Processes:
    """One process for each rank behind one I/O thread. See `TaskClient` for what its verbs promise."""

    def __init__(self, config: TransferConfig, kind: ProcessKind, owner: ProcessOwner, clock: Clock) -> None:
        self.config, self._clock = config, clock
        self.io: ProcessIO | None = None
        self._kind, self._owner = kind, owner
        self._thread: threading.Thread | None = None
        self._stop_lock = threading.Lock()
        self._leaving = threading.Lock()  # guards both flags
        self._has_ended = self._is_left = False  # the thread; and whoever stops it has given up waiting

    def start(self, callbacks: Callbacks, timeout_seconds: float) -> ProcessIO:
        """Start the thread and wait until the processes have started, or the time is over. What it raises for want of
        descriptors or threads leaves nothing behind."""
        try:
            io = self.io = ProcessIO(self.config, self._kind, self._owner, callbacks, self._clock)
            self._begin(io)
            io.started.wait(timeout_seconds)
        except BaseException:  # Ctrl-C, or a shortage: nobody will get to call stop
            self.stop()
            raise
        return io

    def _begin(self, io: ProcessIO) -> None:
        self._thread = threading.Thread(target=self._run, args=(io,), name="transfer-io", daemon=True)
        try:
            self._thread.start()
        except BaseException:
            self._thread = None  # it cannot be waited for
            raise

    def _run(self, io: ProcessIO) -> None:
        """The thread. Where nobody waits for its end any more, it clears up by itself."""
        try:
            io.run()
        finally:
            with self._leaving:  # or both sides could find that the other one will do it
                self._has_ended = True
                is_left = self._is_left
            if is_left:
                self._clear_up(io)

    def _clear_up(self, io: ProcessIO) -> None:
        io.wakeup.close()
        self._owner.close()

    def submit(self, task: TransferTask) -> None:
        """Hand a task over. One that cannot start is answered on the caller's own thread, before this returns."""
        io = self.io
        assert io is not None, "submit before start"
        if io.tasks.accept(task):
            io.wakeup.set()
        else:
            io.callbacks.on_result(failed(task, self.config.tp_size, "the ranks cannot take a task now"))

    def cancel(self, task_id: int) -> None:
        """Nobody waits for this task any more."""
        for signal in self._owner.signals:
            signal.cancel(task_id)

    @property
    def is_open(self) -> bool:
        """Whether they have been started, and not stopped."""
        return self.io is not None and self.io.tasks.is_open

    @property
    def available(self) -> bool:
        """Whether every process is ready."""
        return self.io is not None and self.io.tasks.is_open and self.io.tasks.all_ready.is_set()

    def has_room(self, kind: TaskKind, num_tasks: int = 1) -> bool:
        """Whether so many tasks of this kind, submitted now, would start."""
        return self.io is not None and self.io.tasks.has_room(kind, num_tasks)

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until every process is ready; False when the time is over first."""
        return self.io is not None and self.io.tasks.all_ready.wait(timeout_seconds)

    def statuses(self) -> list[RankStatus]:
        """One entry for each process."""
        return [
            RankStatus(
                rank=r.rank,
                up=r.phase is Phase.READY,
                num_restarts=r.num_restarts,
                pid=process.pid if (process := r.process) is not None else None,
                num_busy_lanes=r.num_busy_lanes,
                state=r.state,
                shortage=r.shortage,
            )
            for r in (self.io.ranks if self.io is not None else [])
        ]

    def last_failure(self) -> str:
        """Why a process is not there, of the first of which that is known."""
        return next((rank.last_failure for rank in (self.io.ranks if self.io else []) if rank.last_failure), "")

    def restart(self, rank: int) -> None:
        """Start its process now if there is none, however often it has died."""
        io = self.io
        assert io is not None
        with io.tasks.lock:
            io.to_restart.add(rank)
        io.wakeup.set()

    def note_change(self, rank: int) -> None:
        """What a rank's process works on has come or gone."""
        io = self.io
        assert io is not None
        with io.tasks.lock:
            io.changed.add(rank)
            # Here, and not by the I/O thread: until that has looked, the next task would still be accepted and begin.
            io.tasks.all_ready.clear()
        io.wakeup.set()

    def stop(self) -> None:
        """End the processes and answer what is in flight as failed. Safe to call twice, and from a callback."""
        if self.io is not None:
            self.io.stopping = True
            self.io.wakeup.set()
        if threading.current_thread() is self._thread:
            return  # by a callback: the thread ends once that has returned, and whoever stops it next clears up
        with self._stop_lock:  # of two callers the second waits for the first
            if self._thread is not None:
                self._thread.join(self.config.stop_timeout_seconds + _CALLBACK_SECONDS)
                with self._leaving:
                    self._is_left = not self._has_ended
                if self._is_left:  # in the caller's callback, or without a processor
                    logger.error("event=io_thread_stuck action=leave_it_what_it_uses")
                    return
                self._thread = None
            if self.io is not None:
                self._clear_up(self.io)
            else:
                self._owner.close()
