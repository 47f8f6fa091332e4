"""What stands where a cache has no other instances: nothing is sent, and nothing is received."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin
from fastdeploy_cache.books.transfer import Transfer
from fastdeploy_cache.peers.processes import NoProcesses
from fastdeploy_cache.peers.transfers import Send
from fastdeploy_cache.requests.active_request import ActiveRequest


class NoTransfers:
    """See `PeerSends` and `PeerReceives`."""

    pins: tuple[Pin, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    held_ids: tuple[int, ...] = ()
    held_units: tuple[list[array[int]], ...] = ()
    loads: tuple[Transfer, ...] = ()

    def __len__(self) -> int:
        return 0

    def step(self, active: ActiveRequest, num_tokens: int, step: int) -> None:
        """Nobody reads it."""

    def committed(self, active: ActiveRequest) -> None:
        """Nobody reads it."""

    def released(self, active: ActiveRequest, private_ids: array[int]) -> Callable[[], array[int]]:  # noqa: ARG002
        """See `PeerSends`. No block stays."""
        return lambda: private_ids

    def cancel(self, send: Send) -> None:
        """It is another cache's."""

    def forget(self, request_id: str) -> None:
        """Nothing has come."""


class NoRoad:
    """See `LinkRoad`, of which this has what is asked of any cache."""

    def __init__(self) -> None:
        self.sends = self.receives = NoTransfers()
        self.processes = NoProcesses()

    def be_quiet(self, quiet: bool) -> None:
        """Nothing is on its way."""

    def cancel_all(self, text: str) -> None:
        """Nothing is on its way."""

    def wait_settled(self, timeout_seconds: float) -> bool:  # noqa: ARG002 (see `LinkRoad`)
        """Nothing is on its way."""
        return True

    def close(self) -> None:
        """There are no processes."""
