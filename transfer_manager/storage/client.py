"""The door to the storage processes, one beside each rank's transfer process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus, ignore_kv_lost
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.process.child import RankProcess
from fastdeploy_cache.transfer_manager.process.client import ProcessClient, config_beside
from fastdeploy_cache.transfer_manager.process.io_thread import RankIO
from fastdeploy_cache.transfer_manager.rank.kv import RankKV
from fastdeploy_cache.transfer_manager.rank.rank_signal import RankSignal
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_place import check_place
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.task import StorageSetup, TaskKind, TransferTask

logger = event_log(__name__)


class StorageClient(Protocol):
    """Takes tasks of storage, answers each exactly once: the part of `TransferClient` that storage has."""

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        """Open the stores. One that cannot be reached in time is tried again and again, and tasks fail until then.

        `on_ready` is called whenever all ranks' stores have been opened, also after one was lost; it may submit.

        Raises:
            StorageRefusedError: the settings are wrong; everything is gone again.
        """
        ...

    def submit(self, task: TransferTask) -> None:
        """See `TransferClient`."""
        ...

    def cancel(self, task_id: int) -> None:
        """See `TransferClient`."""
        ...

    def has_room(self, kind: TaskKind) -> bool:
        """See `TransferClient`."""
        ...

    @property
    def available(self) -> bool:
        """Whether every rank's store is open."""
        ...

    @property
    def needs_token_ids(self) -> bool:
        """Whether the store wants the prompt's tokens beside the hashes; known once it is open."""
        ...

    def statuses(self) -> list[RankStatus]:
        """See `TransferClient`."""
        ...

    def stop(self) -> None:
        """See `TransferClient`."""
        ...


class _Words:
    """The signal words of one storage process."""

    def __init__(self, rank: int) -> None:
        self.array = SharedArray.create(f"storage-signal-rank{rank}", RankSignal.NUM_BYTES)
        self.signal = RankSignal(self.array)


class StorageProcesses(ProcessClient):
    """See `StorageClient`. The CPU blocks are the transfer client's, which has to live longer."""

    def __init__(
        self,
        config: StorageConfig,
        transfer: TransferConfig,
        *,
        layout: RankLayout,
        block_size: int,
        segments: Sequence[SharedArray],
    ) -> None:
        """`segments`: the CPU blocks of each rank. `block_size` in tokens."""
        super().__init__(
            config_beside(
                transfer,
                start_timeout_seconds=config.start_timeout_seconds,
                task_timeout_seconds=config.task_timeout_seconds,
            )
        )
        self._storage, self._layout, self._segments = config, layout, segments
        ranks = range(transfer.tp_size)
        self._spaces = [KeySpace.of(config.weights_id, layout, block_size, rank, transfer.tp_size) for rank in ranks]
        self._words = [_Words(rank) for rank in ranks]

    def start(self, on_result: OnResult, on_ready: Callable[[], None]) -> None:
        try:
            check_place(self._storage)
        except StorageRefusedError:
            self.stop()
            raise
        kv = [RankKV(rank, self._layout, 0, None) for rank in range(self._config.tp_size)]
        io = RankIO(
            self._config,
            spawn=self._spawn,
            memory=self._words,
            kv=kv,
            on_result=on_result,
            on_kv_lost=ignore_kv_lost,
            on_ready=on_ready,
            optional=True,
            process_name="storage",
        )
        self._start_io(io, on_result, self._storage.start_timeout_seconds)
        if io.start_failure is not None:
            self.stop()
            raise StorageRefusedError(f"storage of kind {self._storage.kind!r} cannot be opened: {io.start_failure}")
        if not io.all_ready.is_set():
            failure = next((rank.last_failure for rank in io.ranks if rank.last_failure), "")
            logger.warning("event=storage_late kind=%s action=go_on_without failure=%r", self._storage.kind, failure)

    def cancel(self, task_id: int) -> None:
        for words in self._words:
            words.signal.cancel(task_id)

    @property
    def needs_token_ids(self) -> bool:
        return self._io is not None and self._io.needs_token_ids

    def _spawn(self, rank: int, incarnation: int, queue_address: str) -> RankProcess:
        segment, words, space = self._segments[rank], self._words[rank], self._spaces[rank]
        setup = StorageSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_address=queue_address,
            num_cpu_blocks=segment.num_bytes // space.object_bytes,
            cpu_fd=segment.fd,
            signal_fd=words.array.fd,
            heartbeat_seconds=self._config.heartbeat_seconds,
            max_tasks_in_flight=self._config.max_tasks_in_flight,
            kind=self._storage.kind,
            options=self._storage.store_options(self._config.tp_size),
            space=space,
            import_paths=[str(Path(entry).absolute()) for entry in sys.path] if self._storage.is_own_store else [],
        )
        program = "fastdeploy_cache.transfer_manager.storage"
        return RankProcess(setup, self._config, (segment.fd, words.array.fd), program)

    def _close_memory(self) -> None:
        for words in self._words:
            words.array.close()
