"""What the engine shares with its storage processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from fastdeploy_cache.errors import CodecError
from fastdeploy_cache.ipc.codec import decode
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.process.owner import ProcessOwner
from fastdeploy_cache.transfer_manager.process.words import RankSignal
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.keys import KeySpace
from fastdeploy_cache.transfer_manager.storage.setup import StorageSetup, StoreReport


class StorageOwner(ProcessOwner):
    """See `process.owner.ProcessOwner`: signal words of its own, and the CPU blocks of the transfer client."""

    def __init__(
        self,
        config: StorageConfig,
        transfer: TransferConfig,
        *,
        spaces: Sequence[KeySpace],
        segments: Sequence[SharedArray],
        shares: Sequence[tuple[bytes, float, float]] = (),
    ) -> None:
        """`shares`: see `StorageProcesses`."""
        self._storage, self._config, self._spaces, self._segments = config, transfer, spaces, segments
        self.signals = [RankSignal.create(f"storage-signal-rank{rank}") for rank in range(transfer.tp_size)]
        self._shares, self.needs_token_ids = list(shares), False

    def spawn(self, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> ChildProcess:
        segment, signal_fd, space = self._segments[rank], self.signals[rank].array.fd, self._spaces[rank]
        setup = StorageSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_fds=queue_fds,
            num_cpu_blocks=segment.num_bytes // space.object_bytes,
            cpu_fd=segment.fd,
            signal_fd=signal_fd,
            heartbeat_seconds=self._config.heartbeat_seconds,
            kind=self._storage.kind,
            options=self._storage.store_options(space.tp_size) | ({"shares": self._shares} if self._shares else {}),
            space=space,
            keys_file=self._storage.keys_file,
            import_paths=[str(Path(entry).absolute()) for entry in sys.path] if self._storage.is_own_store else [],
        )
        program = "fastdeploy_cache.transfer_manager.storage"
        return ChildProcess(setup, self._config, (*queue_fds, segment.fd, signal_fd), program)

    def take_report(self, rank: int, report: bytes, num_restarts: int) -> str | None:  # noqa: ARG002
        try:
            store: StoreReport = decode(report, StoreReport)
        except CodecError as error:
            return f"what it says of its store is no report: {error}"
        self.needs_token_ids |= store.needs_token_ids
        return None

    def close(self) -> None:
        for signal in self.signals:
            signal.array.close()
