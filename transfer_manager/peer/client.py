"""The door to the peer processes, one beside each rank's transfer process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from fastdeploy_cache.errors import IPCError, PeerRefusedError
from fastdeploy_cache.ipc.clock import SYSTEM_CLOCK, Clock
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.ipc.peer_channel import load_keys
from fastdeploy_cache.transfer_manager.client import OnResult, TaskClient
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.peer.owner import PeerOwner
from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress
from fastdeploy_cache.transfer_manager.process.callbacks import Callbacks, ignore_failing
from fastdeploy_cache.transfer_manager.process.client import Processes, config_beside
from fastdeploy_cache.transfer_manager.process.owner import ProcessKind
from fastdeploy_cache.transfer_manager.task import TransferTask

logger = event_log(__name__)


class PeerClient(TaskClient, Protocol):
    """The client that sends blocks to other instances and receives theirs, one process for each rank."""

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

    def wait_ready(self, timeout_seconds: float) -> bool:
        """See `TransferClient`."""
        ...

    def step_progress(self, rank: int) -> StepProgress:
        """What the rank's model worker marks its layers with."""
        ...

    def num_layers_in_flight(self, slot: int) -> int:
        """Layers that the peers of a slot have computed and that are not here yet, of all ranks."""
        ...


class PeerProcesses:
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
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """`kv`: by rank its KV arrays, or None where they come later.

        Raises:
            PeerRefusedError: keys are missing.
        """
        self._peer = config
        self.public_key = b""
        if config.keys_folder is not None:
            try:
                self.public_key = load_keys(Path(config.keys_folder)).public
            except IPCError as error:
                raise PeerRefusedError(str(error)) from error
        beside = config_beside(transfer)
        self._owner = PeerOwner(
            config, beside, instance_id=instance_id, layout=layout, num_gpu_blocks=num_gpu_blocks, kv=kv
        )
        self.addresses = self._owner.addresses
        kind = ProcessKind(name="peer", is_optional=True, in_order=False)
        self._processes = own = Processes(beside, kind, self._owner, clock)
        self.submit, self.has_room = own.submit, own.has_room
        self.wait_ready, self.statuses, self.stop = own.wait_ready, own.statuses, own.stop

    def start(self, on_result: OnResult, on_failing: Callable[[TransferTask], None] = ignore_failing) -> None:
        callbacks = Callbacks(on_result, on_failing=on_failing)
        io = self._processes.start(callbacks, self._processes.config.start_timeout_seconds)
        if io.start_failure is not None:
            self.stop()
            raise PeerRefusedError(f"link {self._peer.link!r} to other instances cannot be opened: {io.start_failure}")
        if not io.started.is_set():
            failure = self._processes.last_failure()
            logger.warning("event=peers_late link=%s action=go_on_without failure=%r", self._peer.link, failure)

    def attach_kv(self, rank: int, kv: KVHandle) -> None:
        self._owner.take_kv(rank, kv)
        self._processes.note_change(rank)

    def kv_lost(self, rank: int) -> None:
        self._owner.kv[rank].drop()
        self._processes.note_change(rank)

    def step_progress(self, rank: int) -> StepProgress:
        return StepProgress(self._owner.peer_signals[rank])

    def num_layers_in_flight(self, slot: int) -> int:
        return sum(signal.in_flight(slot) for signal in self._owner.peer_signals)

    @property
    def available(self) -> bool:
        return self._processes.available
