"""What the engine shares with its publisher."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache.events.publisher.setup import PublisherSetup
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.process.owner import ProcessOwner
from fastdeploy_cache.transfer_manager.process.words import RankSignal

MakeSetup = Callable[[int, tuple[int, ...], int], PublisherSetup]  # incarnation, ends of its queue, signal words


class PublisherOwner(ProcessOwner):
    """See `process.owner.ProcessOwner`: there is one process, whatever the number of ranks."""

    def __init__(self, transfer: TransferConfig, new_setup: MakeSetup) -> None:
        self._transfer, self._new_setup = transfer, new_setup
        self.signals = [RankSignal.create("events-process-signal")]

    def spawn(self, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> ChildProcess:  # noqa: ARG002 (one)
        signal_fd = self.signals[0].array.fd
        setup = self._new_setup(incarnation, queue_fds, signal_fd)
        return ChildProcess(setup, self._transfer, (*queue_fds, signal_fd), "fastdeploy_cache.events.publisher")

    def close(self) -> None:
        self.signals[0].array.close()
