"""The door to the storage processes, one beside each rank's transfer process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult, TaskClient
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks
from fastdeploy_cache.transfer_manager.process.client import Processes, config_beside
from fastdeploy_cache.transfer_manager.process.owner import ProcessKind
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_place import check_place
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.storage.owner import StorageOwner

logger = event_log(__name__)


class StorageClient(TaskClient, Protocol):
    """The client that reads and writes a store, one process for each rank. Its tasks are of `TaskKind.LOOKUP`,
    `PREFETCH`, `WRITE`, `CLEAR` and `PROBE`."""

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        """Open the stores. One that cannot be reached in time is tried again and again, and tasks fail until then.

        `on_ready` is called whenever all ranks' stores have been opened, also after one was lost; it may submit.

        Raises:
            StorageRefusedError: the settings are wrong; everything is gone again.
        """
        ...

    def cancel(self, task_id: int) -> None:
        """See `TransferClient`."""
        ...

    @property
    def needs_token_ids(self) -> bool:
        """Whether the store wants the prompt's tokens beside the hashes; known once it is open."""
        ...


class StorageProcesses:
    """See `StorageClient`. The CPU blocks are the transfer client's, which has to live longer."""

    def __init__(
        self,
        config: StorageConfig,
        transfer: TransferConfig,
        *,
        spaces: Sequence[KeySpace],
        segments: Sequence[SharedArray],
        shares: Sequence[tuple[bytes, float, float]] = (),
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`spaces` and `segments`: of each of `transfer.tp_size` ranks, the names of its blocks and its CPU blocks.
        `shares`: of a file store, as `FileStorage` takes them."""
        beside = config_beside(
            transfer,
            start_timeout_seconds=config.start_timeout_seconds,
            task_timeout_seconds=config.task_timeout_seconds,
        )
        self._storage = config
        self._owner = StorageOwner(config, beside, spaces=spaces, segments=segments, shares=shares)
        kind = ProcessKind(name="storage", is_optional=True)
        self._processes = own = Processes(beside, kind, self._owner, clock)
        self.submit, self.cancel, self.has_room = own.submit, own.cancel, own.has_room
        self.wait_ready, self.statuses, self.stop = own.wait_ready, own.statuses, own.stop

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        try:
            check_place(self._storage)
        except BaseException:  # refused; or no thread to try it with
            self.stop()
            raise
        io = self._processes.start(Callbacks(on_result, on_ready=on_ready), self._storage.start_timeout_seconds)
        if io.start_failure is not None:
            self.stop()
            raise StorageRefusedError(f"storage of kind {self._storage.kind!r} cannot be opened: {io.start_failure}")
        if not io.tasks.all_ready.is_set():
            failure = self._processes.last_failure()
            logger.warning("event=storage_late kind=%s action=go_on_without failure=%r", self._storage.kind, failure)

    @property
    def needs_token_ids(self) -> bool:
        return self._owner.needs_token_ids

    @property
    def available(self) -> bool:
        return self._processes.available
