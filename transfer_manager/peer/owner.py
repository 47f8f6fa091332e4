"""What the engine shares with its peer processes."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence

from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.private_directory import PrivateDirectory
from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.kv.rank_kv import RankKV
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.peer_signal import PeerSignal
from fastdeploy_cache.transfer_manager.peer.setup import PeerSetup
from fastdeploy_cache.transfer_manager.process.child import ChildProcess
from fastdeploy_cache.transfer_manager.process.owner import ProcessOwner
from fastdeploy_cache.transfer_manager.process.words import RankSignal


class PeerOwner(ProcessOwner):
    """See `process.owner.ProcessOwner`: signal words, control sockets' addresses, and KV arrays of others."""

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
        self._peer, self._config, self._instance_id = config, transfer, instance_id
        self._layout, self._num_gpu_blocks = layout, num_gpu_blocks
        ranks = range(transfer.tp_size)
        self.signals = [RankSignal.create(f"peer-process-signal-rank{rank}") for rank in ranks]
        self._peer_arrays = [SharedArray.create(f"peer-signal-rank{rank}", PeerSignal.NUM_BYTES) for rank in ranks]
        self.peer_signals = [PeerSignal(array) for array in self._peer_arrays]
        self.kv = [RankKV(rank, layout, num_gpu_blocks, None) for rank in ranks]
        for mine, handle in zip(self.kv, kv, strict=True):
            if handle is not None:
                mine.take(handle)
        # A rank may tell of new arrays while the manager closes: taken after `close`, they would never be given back.
        self._closing, self._is_closed = threading.Lock(), False
        self._directory = PrivateDirectory()  # last: what is refused above would leave it, and its lock
        self.addresses = tuple(self._address(rank) for rank in ranks)

    def _address(self, rank: int) -> str:
        if not self._peer.listen:
            return f"ipc://{self._directory.path}/rank{rank}"
        host, _, port = self._peer.listen.rpartition(":")
        return f"{host}:{int(port) + rank}"

    def spawn(self, rank: int, incarnation: int, queue_fds: tuple[int, ...]) -> ChildProcess:
        signal_fd, peer_fd = self.signals[rank].array.fd, self._peer_arrays[rank].fd
        kv, kv_fds = self.kv[rank].for_process()
        if kv is None:
            raise IPCError("its KV arrays are gone")
        setup = PeerSetup(
            rank=rank,
            incarnation=incarnation,
            engine_pid=os.getpid(),
            queue_fds=queue_fds,
            signal_fd=signal_fd,
            heartbeat_seconds=self._config.heartbeat_seconds,
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
            peer_signal_fd=peer_fd,
        )
        return ChildProcess(
            setup, self._config, (*queue_fds, *kv_fds, signal_fd, peer_fd), "fastdeploy_cache.transfer_manager.peer"
        )

    def take_kv(self, rank: int, kv: KVHandle) -> None:
        """These are the rank's arrays from now on. Any thread. Raises as `RankKV.take`."""
        with self._closing:
            if not self._is_closed:
                self.kv[rank].take(kv)

    def may_run(self, rank: int) -> bool:
        return self.kv[rank].handle is not None

    def follow(self, rank: int) -> str | None:
        return self.kv[rank].follow()

    def close(self) -> None:
        with self._closing:
            self._is_closed = True
        for signal, array, kv in zip(self.signals, self._peer_arrays, self.kv, strict=True):
            signal.array.close()
            array.close()
            kv.drop()
            kv.sweep()
        self._directory.remove()
