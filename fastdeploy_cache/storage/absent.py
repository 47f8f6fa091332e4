"""What stands where no store is attached: it has nothing, wants nothing and waits for nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.run import Pin, Run
from fastdeploy_cache.storage.prefetch import StoragePrefetch
from fastdeploy_cache.transfer_manager.client import RankStatus


class NoReads:
    """See `StorageReads`."""

    pins: Sequence[Pin] = ()
    held: Sequence[Checkpoint] = ()

    def wants(self, num_missing_blocks: int) -> bool:  # noqa: ARG002 (see `StorageReads`)
        """There is nobody to ask."""
        return False

    def start(self, prefetch: StoragePrefetch) -> None:
        """Nothing comes: see `wants`."""
        prefetch.done.set()

    def of(self, request_id: str) -> StoragePrefetch | None:  # noqa: ARG002 (see `StorageReads`)
        """Nothing is being fetched."""
        return None

    take = of

    def forget(self, request_id: str) -> None:
        """Nothing is being fetched."""

    def follow(self, prefetch: StoragePrefetch) -> None:
        """A prefetch of a store that was detached has ended."""

    def revoke(self, prefetch: StoragePrefetch) -> None:
        """It has ended with its store."""

    def stop(self, namespace: str | None = None) -> None:
        """Nothing is being fetched."""


class NoTier:
    """See `StorageTier`."""

    def __init__(self) -> None:
        self.reads = NoReads()
        self.held_ids: Sequence[int] = ()
        self.is_idle = True
        self.tasks_in_flight: Mapping[str, int] = {}

    def write(self, path: Sequence[Run]) -> None:
        """There is nothing to write to."""

    def be_quiet(self, quiet: bool) -> None:
        """It is."""

    def note_admitted(self, num_tokens: int) -> None:
        """There is nobody to ask."""

    def wait_settled(self, timeout_seconds: float) -> bool:  # noqa: ARG002 (see `StorageTier`)
        """Nothing is on its way."""
        return True

    def statuses(self) -> list[RankStatus]:
        """There are no processes."""
        return []

    def stats(self) -> None:
        """There is nothing to count."""
