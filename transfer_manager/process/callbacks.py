"""The caller's code that the I/O thread runs: what it raises costs what the call was about, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.transfer_manager.client import OnResult
from fastdeploy_cache.transfer_manager.task import TransferTask

logger = event_log(__name__)


def ignore_ready() -> None:
    """Do nothing: the caller asks whether all are ready."""


def ignore_failing(task: TransferTask) -> None:
    """Do nothing: the tasks end soon anyway."""


class Callbacks:
    """What is to be called, and how often it has failed.

    `on_result` gets every task's end, `on_ready` is called each time that all processes have become ready,
    `on_failing` when one has failed a task that others still work on.
    """

    def __init__(
        self,
        on_result: OnResult,
        *,
        on_ready: Callable[[], None] = ignore_ready,
        on_failing: Callable[[TransferTask], None] = ignore_failing,
    ) -> None:
        self.on_result, self.on_ready, self.on_failing = on_result, on_ready, on_failing
        self.num_failed = 0

    def call(self, call: Callable[[], None]) -> None:
        """Call it on the I/O thread, which every other task needs: nothing that it raises ends the thread."""
        try:
            call()
        except Exception:
            self.num_failed += 1
            logger.exception("event=callback_failed num_failures=%d", self.num_failed)
