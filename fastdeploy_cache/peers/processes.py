"""The peer processes, as ranks and callers see them. Any thread."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from fastdeploy_cache.errors import ConfigError, LayoutError
from fastdeploy_cache.ipc.event_log import event_log

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.client import RankStatus
    from fastdeploy_cache.transfer_manager.peer.client import PeerClient
    from fastdeploy_cache.transfer_manager.peer.peer_signal import StepProgress
    from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient

logger = event_log(__name__)


class LinkProcesses:
    """One beside each rank, over the rank's KV arrays."""

    def __init__(self, client: PeerClient, ranks: TransferClient) -> None:
        self._client, self._ranks = client, ranks
        # Two threads may tell of a rank's arrays while the peers are being opened: the one that has looked at those of
        # before could tell of them after the other one has told of the new ones.
        self._telling = threading.Lock()

    def step_progress(self, rank: int) -> StepProgress:
        """Where the rank's worker marks the layers that it has computed."""
        return self._client.step_progress(rank)

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until every peer process is ready; False when the time is over first."""
        return self._client.wait_ready(timeout_seconds)

    def statuses(self) -> list[RankStatus]:
        """One entry for each peer process."""
        return self._client.statuses()

    def attach_kv(self, rank: int) -> None:
        """The rank has other KV arrays."""
        with self._telling:
            try:
                self._client.attach_kv(rank, self._ranks.kv_handle(rank))
            except LayoutError:  # not there yet
                logger.info("event=peer_waits_for_kv rank=%d", rank)

    def lose_kv(self, rank: int) -> None:
        """The rank's KV arrays have gone."""
        with self._telling:
            self._client.kv_lost(rank)


class NoProcesses:
    """There are none: without other instances, and where they share a store."""

    def step_progress(self, rank: int) -> StepProgress:  # noqa: ARG002 (see `LinkProcesses`)
        """Raise `ConfigError`: a store takes whole blocks, and nobody else reads layers."""
        raise ConfigError("this cache sends no layers; give its configuration a table 'peer' with a link")

    def wait_ready(self, timeout_seconds: float) -> bool:  # noqa: ARG002 (see `LinkProcesses`)
        """There is nothing to wait for."""
        return True

    def statuses(self) -> list[RankStatus]:
        """There are none."""
        return []

    def attach_kv(self, rank: int) -> None:
        """Nobody reads KV arrays."""

    def lose_kv(self, rank: int) -> None:
        """Nobody reads KV arrays."""
