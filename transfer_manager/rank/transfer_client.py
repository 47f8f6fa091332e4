"""The door to the ranks: one contract, with processes behind it (`rank.client`) or without (`rank.inline_client`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from fastdeploy_cache.ipc.shared_array import SharedArray
from fastdeploy_cache.transfer_manager.client import OnResult, TaskClient
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress

OnKVLost = Callable[[int], None]
KVArrays = KVHandle | Sequence[Mapping[str, Any]]  # of another process, or per layer, by part name, of this one


def ignore_kv_lost(rank: int) -> None:
    """Do nothing: the caller keeps nothing that could be lost."""


class TransferClient(TaskClient, Protocol):
    """The client that moves blocks between the tiers of this machine, and has the ranks' memory.

    What has a body here is so without processes: a task has ended when `submit` returns.
    """

    def start(self, on_result: OnResult, on_kv_lost: OnKVLost = ignore_kv_lost) -> None:
        """Make the ranks ready; those whose KV arrays a worker owns wait for `attach_kv`.

        `on_result` gets every task's end, `on_kv_lost` a rank that has died with the KV arrays that it owned, and
        again when it has made new ones; on any thread, never under a lock of the client.

        Raises:
            RankStartError: a rank failed or was too late; all ranks are gone again.
        """
        ...

    def cancel(self, task_id: int) -> None:  # noqa: ARG002
        """Nobody waits for this task any more: a rank that has not begun it answers at once, as failed."""
        return

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until every rank is ready; False when the time is over first."""
        ...

    def kv_views(self, rank: int) -> KVViews:
        """The rank's KV arrays [num_gpu_blocks, *part shape], by layer and part name.

        Raises:
            LayoutError: the arrays are not here: nobody has attached them, or they are on a GPU.
        """
        ...

    def kv_handle(self, rank: int) -> KVHandle:
        """The rank's KV arrays for a worker process. Raises as `kv_views`."""
        ...

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        """A worker has come: these are the rank's KV arrays from now on. Waits until the rank has them.

        Raises:
            LayoutError, IPCError: they do not fit the layout, or cannot be reached.
            RankStartError: the rank could not attach them; it stays without.
        """
        ...

    def kv_lost(self, rank: int) -> None:
        """The worker is gone, and its KV arrays with it: nothing is copied until `attach_kv`; tasks in flight fail."""
        ...

    def restart(self, rank: int) -> None:  # noqa: ARG002
        """Start the rank's process now if there is none, however often it has died; returns at once."""
        return

    def layer_progress(self, rank: int) -> LayerProgress | None:  # noqa: ARG002
        """How far the rank's loads are, for its worker; None where loads have ended when `submit` returns."""
        return None

    def cpu_segments(self) -> list[SharedArray]:
        """The memory of each rank's CPU blocks, one image after the other, good until the client is stopped."""
        ...

    def release_memory(self, *, gpu: bool, cpu: bool) -> int:
        """Give back the pages of the KV arrays, of the CPU blocks, as far as they are this side's; returns the bytes.

        Nothing is in flight. What they held is gone; every mapping stays valid.
        """
        ...

    def retake_memory(self) -> None:
        """Reserve again what was released; raises `NotEnoughMemoryError` where it is not to be had."""
        ...
