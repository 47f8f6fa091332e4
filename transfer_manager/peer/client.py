"""The door to the peer processes, one beside each rank's transfer process."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fastdeploy_cache.errors import IPCError, PeerRefusedError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult, RankStatus, ignore_kv_lost
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.peer_signal import PeerSignal, StepProgress
from fastdeploy_cache.transfer_manager.process.child import RankProcess
from fastdeploy_cache.transfer_manager.process.client import ProcessClient, config_beside
from fastdeploy_cache.transfer_manager.process.io_thread import RankIO, ignore_failing
from fastdeploy_cache.transfer_manager.rank.kv import RankKV
from fastdeploy_cache.transfer_manager.rank.rank_signal import RankSignal
from fastdeploy_cache.transfer_manager.task import PeerSetup, TaskKind, TransferTask

logger = event_log(__name__)


class PeerClient(Protocol):
    """Takes sends and receives, answers each exactly once: the part of `TransferClient` that peers have."""

    addresses: tuple[str, ...]  # of the ranks' control sockets
    public_key: bytes

    def start(self, on_result: OnResult, on_failing: Callable[[TransferTask], None] = ignore_failing) -> None:
        """Start the processes. One that dies is started again and again, and tasks fail until then.

        `on_failing` gets a send or a receive that a rank has failed while others still work on it.

        Raises:
            PeerRefusedError: the settings are wrong; everything is gone again.
        """
        ...

    def attach_kv(self, rank: int, kv: KVHandle) -> None:
        """These are the rank's KV arrays from now on; nothing is sent or received before."""
        ...

    def kv_lost(self, rank: int) -> None:
        """They are gone: tasks in flight fail, and nothing is sent or received until `attach_kv`."""
        ...

    def submit(self, task: TransferTask) -> None:
        """See `TransferClient`."""
        ...

    def has_room(self, kind: TaskKind) -> bool:
        """See `TransferClient`."""
        ...

    @property
    def available(self) -> bool:
        """Whether every rank's process is ready."""
        ...

    def wait_ready(self, timeout_seconds: float) -> bool:
        """See `TransferClient`."""
        ...

    def statuses(self) -> list[RankStatus]:
        """See `TransferClient`."""
        ...

    def step_progress(self, rank: int) -> StepProgress:
        """For the rank's model worker."""
        ...

    def num_layers_in_flight(self, slot: int) -> int:
        """Layers that the peers of a slot have computed and that are not here yet, of all ranks."""
        ...

    def stop(self) -> None:
        """See `TransferClient`."""
        ...


class _Words:
    """The signal words of one peer process."""

    def __init__(self, rank: int) -> None:
        self.array = SharedArray.create(f"peer-process-signal-rank{rank}", RankSignal.NUM_BYTES)
        self.signal = RankSignal(self.array)
        self.peer_array = SharedArray.create(f"peer-signal-rank{rank}", PeerSignal.NUM_BYTES)
        self.peer_signal = PeerSignal(self.peer_array)


class PeerProcesses(ProcessClient):
    """See `PeerClient`. It starts a rank's process once the rank's KV arrays are attached."""

    def __init__(
        self,
        config: PeerConfig,
        transfer: TransferConfig,
        *,
        instance_id: bytes,
        layout: RankLayout,
        num_gpu_blocks: int,
        kv: Sequence[KVHandle | None],
    ) -> None:
        """`kv`: by rank its KV arrays, or None where they come later.

        Raises:
            PeerRefusedError: keys are missing.
        """
        # the engine's own arrays are there; those of others are waited for by nobody
        super().__init__(config_beside(transfer, kv_owner="engine" if all(kv) else "worker"))
        self._peer, self._instance_id, self._layout, self._num_gpu_blocks = config, instance_id, layout, num_gpu_blocks
        self.public_key = b""
        if config.keys_folder is not None:
            try:
                self.public_key = load_keys(Path(config.keys_folder)).public
            except IPCError as error:
                raise PeerRefusedError(str(error)) from error
        ranks = range(transfer.tp_size)
        self._directory = PrivateDirectory()
        self.addresses = tuple(self._address(rank) for rank in ranks)
        self._words = [_Words(rank) for rank in ranks]
        self._kv = [RankKV(rank, layout, num_gpu_blocks, None) for rank in ranks]
        for mine, handle in zip(self._kv, kv, strict=True):
            if handle is not None:
                mine.take(handle)

    def _address(self, rank: int) -> str:
        if not self._peer.listen:
            return f"ipc://{self._directory.path}/rank{rank}"
        host, _, port = self._peer.listen.rpartition(":")
        return f"{host}:{int(port) + rank}"

    def start(self, on_result: OnResult, on_failing: Callable[[TransferTask], None] = ignore_failing) -> None:
        io = RankIO(
            self._config,
            spawn=self._spawn,
            memory=self._words,
            kv=self._kv,
            on_result=on_result,
            on_kv_lost=ignore_kv_lost,
            on_failing=on_failing,
            optional=True,
            in_order=False,
            process_name="peer",
        )
        for rank, kv in enumerate(self._kv):
            io.ranks[rank].parked = kv.handle is None
        self._start_io(io, on_result, self._config.start_timeout_seconds)
        if io.start_failure is not None:
            self.stop()
            raise PeerRefusedError(f"link {self._peer.link!r} to other instances cannot be opened: {io.start_failure}")
        if not io.started.is_set():
            failure = next((rank.last_failure for rank in io.ranks if rank.last_failure), "")
            logger.warning("event=peers_late link=%s action=go_on_without failure=%r", self._peer.link, failure)

    def attach_kv(self, rank: int, kv: KVHandle) -> None:
        self._kv[rank].take(kv)
        self._tell_kv_changed(rank)

    def kv_lost(self, rank: int) -> None:
        self._kv[rank].drop()
        self._tell_kv_changed(rank)

    def cancel(self, task_id: int) -> None:
        """Receives are ended by tasks of their own."""

    def step_progress(self, rank: int) -> StepProgress:
        return StepProgress(self._words[rank].peer_signal)

    def num_layers_in_flight(self, slot: int) -> int:
        return sum(words.peer_signal.in_flight(slot) for words in self._words)

    def _spawn(self, rank: int, incarnation: int, queue_address: str) -> RankProcess:
        words, (kv, kv_fds) = self._words[rank], self._kv[rank].for_process()
        if kv is None:
            raise IPCError("its KV arrays are gone")
        setup = PeerSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_address=queue_address,
            signal_fd=words.array.fd,
            heartbeat_seconds=self._config.heartbeat_seconds,
            max_tasks_in_flight=self._config.max_tasks_in_flight,
            tp_size=self._config.tp_size,
            layout=self._layout,
            num_gpu_blocks=self._num_gpu_blocks,
            kv=kv,
            instance_id=self._instance_id,
            name=self._peer.name,
            link=self._peer.link,
            link_options=self._peer.link_options(),
            address=self.addresses[rank],
            keys_folder=self._peer.keys_folder,
            silence_seconds=self._peer.silence_timeout_seconds,
            peer_signal_fd=words.peer_array.fd,
        )
        fds = (*kv_fds, words.array.fd, words.peer_array.fd)
        return RankProcess(setup, self._config, fds, "fastdeploy_cache.transfer_manager.peer")

    def _close_memory(self) -> None:
        for words, kv in zip(self._words, self._kv, strict=True):
            words.array.close()
            words.peer_array.close()
            kv.drop()
            kv.sweep()
        self._directory.remove()
