"""The ranks, and what the workers of their model need: `cache.ranks`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from fastdeploy_cache.books.block_pool import RUN
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.changes import GpuForgotten, TierLost
from fastdeploy_cache.books.mishaps import call_user
from fastdeploy_cache.books.run import GPU
from fastdeploy_cache.books.tier_loss import drop_gpu
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.clock import seconds_to_wait
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.movement import Movement
from fastdeploy_cache.peers.peers import Peers

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.client import RankStatus
    from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
    from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress
    from fastdeploy_cache.transfer_manager.rank.transfer_client import KVArrays

logger = event_log(__name__)


class RankAccess:
    """KV arrays, the progress of loads, and whether the processes are up. Any thread."""

    def __init__(
        self,
        config: CacheConfig,
        books: Books,
        movement: Movement,
        peers: Peers,
        tell_kv_lost: Callable[[int], None] | None,
    ) -> None:
        """`tell_kv_lost`: see `on_kv_lost` of `PrefixCacheManager`."""
        self._config, self._books = config, books
        self._client, self._mover, self._peers = movement.client, movement.mover, peers
        self._tell_kv_lost = tell_kv_lost
        if config.transfer.owner_of_kv == "worker":
            for rank in range(config.transfer.tp_size):
                self._mover.note_kv(rank, is_there=False)

    def wait_ready(self, timeout_seconds: float) -> bool:
        """Wait until every rank is ready, after one has died; False when the time is over first."""
        return self._client.wait_ready(seconds_to_wait("wait_ready", timeout_seconds))

    def statuses(self) -> list[RankStatus]:
        """One entry for each rank."""
        return self._client.statuses()

    def restart(self, rank: int | None = None) -> list[int]:
        """Start the process of a rank, or of each, now where there is none, however often it has died before; such as
        when what it died of is mended. Returns the ranks that are started; `wait_ready` waits for them.

        Raises:
            ConfigError: no such rank.
        """
        if rank is not None:
            self._config.check_rank(rank)
        down = [each.rank for each in self.statuses() if each.pid is None and rank in (None, each.rank)]
        for number in down:
            self._client.restart(number)
        return down

    def kv_views(self, rank: int) -> KVViews:
        """The rank's KV memory in CPU memory: per layer, by part name (`key`, `value`, ...), the array
        [blocks, *shape of the part], shared with the rank's process.

        Raises:
            ConfigError: no such rank, or a cache without a layout.
            LayoutError: the arrays are a worker's that has not attached them, or on a GPU.
        """
        self._check_rank(rank)
        return self._client.kv_views(rank)

    def kv_handle(self, rank: int) -> KVHandle:
        """The rank's KV arrays for a worker in another process: `KVMemory.open` there. Raises as `kv_views`."""
        self._check_rank(rank)
        return self._client.kv_handle(rank)

    def attach_kv(self, rank: int, kv: KVArrays) -> None:
        """A worker has made the rank's KV arrays (`kv_owner = "worker"`): use them. Waits until the rank has them.

        Requests that were matched before are void, as after `kv_lost`.

        `kv` is a `KVHandle`; with `transfer_client = "inline"` the arrays themselves, per layer, by part name.

        Raises:
            ConfigError, LayoutError, IPCError: they do not fit, or cannot be reached.
            RankStartError: the rank could not attach them.
            ClosedError: the cache is closed.
        """
        self._check_rank(rank)
        self._books.check_open()
        has_kv = None  # where it is refused, the rank has what it had before
        try:
            self._client.attach_kv(rank, kv)
            has_kv = True
        finally:
            # What was computed while the arrays were missing, or on some that came too late, is nowhere. The rank can
            # move bytes already: copied down before this, the zeros of the new arrays would pass for it.
            self._forget_gpu(rank, has_kv=has_kv)
        self._peers.road.processes.attach_kv(rank)

    def kv_lost(self, rank: int) -> None:
        """The rank's worker is gone with its KV arrays. Call this before the model computes on another worker's.

        Everything on the GPU is forgotten, on all ranks; the CPU tier stays. Running requests are void: they publish
        nothing any more; release them and match them again once `attach_kv` has brought new arrays.
        """
        self._config.check_rank(rank)
        self._client.kv_lost(rank)
        try:
            self._peers.road.processes.lose_kv(rank)
        finally:
            self._forget_gpu(rank, has_kv=False if self._config.transfer.owner_of_kv == "worker" else None)

    def layer_progress(self, rank: int) -> LayerProgress | None:
        """How far the rank's loads are, layer by layer, for its worker; None with `transfer_client = "inline"`."""
        self._check_rank(rank)
        return self._client.layer_progress(rank)

    def on_kv_lost(self, rank: int) -> None:
        """A rank that owns its KV arrays has died with them, or has made new ones. On the client's thread.

        Until the engine has been told, its model may compute on the arrays of before, for requests that were matched
        when these had been forgotten already: so they are forgotten once more, and nothing is moved in between.
        """
        try:
            self._peers.road.processes.lose_kv(rank)
        finally:  # whatever else fails: what has gone must not be found
            self._forget_gpu(rank, has_kv=False)
            if (tell := self._tell_kv_lost) is not None and not self._books.is_closed:  # their end is no loss
                call_user(lambda: tell(rank))
            self._forget_gpu(rank, has_kv=True)
        self._peers.road.processes.attach_kv(rank)

    def _check_rank(self, rank: int) -> None:
        self._config.check_rank(rank)
        if self._config.layout is None:
            raise ConfigError("this cache has no KV arrays; give its configuration a layout")

    def _forget_gpu(self, rank: int, *, has_kv: bool | None) -> None:
        """`has_kv`: whether the engine computes on the rank's KV arrays; None where that has not changed."""
        with self._books:
            num_gone = self._books.pools[GPU].count(RUN)
            drop_gpu(self._books.tree)
            self._books.note(TierLost())
            self._books.note(GpuForgotten(rank=rank))
            if has_kv is not None:
                self._mover.note_kv(rank, is_there=has_kv)
            self._peers.road.cancel_all("the KV arrays are lost")
            level = logging.INFO if num_gone else logging.DEBUG  # the first arrays take nothing away
            logger.log(level, "event=gpu_forgotten rank=%d num_blocks=%d", rank, num_gone)
