"""What a manager offers to the workers of its ranks: KV arrays and the progress of loads."""

from __future__ import annotations

import threading
from collections.abc import Callable

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.tier_loss import drop_gpu
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.ipc.event_log import event_log
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.requests.loads import call_user
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle, KVViews
from fastdeploy_cache.transfer_manager.rank.layer_progress import LayerProgress
from fastdeploy_cache.transfer_manager.rank.transfer_client import KVArrays, TransferClient

logger = event_log(__name__)


class RankAccess:
    """The part of `PrefixCacheManager` that is about ranks; any thread."""

    config: CacheConfig
    _call_on_kv_lost: Callable[[int], None] | None
    _client: TransferClient
    _lock: threading.Lock
    _mover: BlockMover
    _tree: PrefixTree

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
        """
        self._check_rank(rank)
        has_kv = None  # where it is refused, the rank has what it had before
        try:
            self._client.attach_kv(rank, kv)
            has_kv = True
        finally:
            # What was computed while the arrays were missing, or on some that came too late, is nowhere. The rank can
            # move bytes already: copied down before this, the zeros of the new arrays would pass for it.
            self._forget_gpu(rank, has_kv=has_kv)
        self._peers_attach_kv(rank)

    def kv_lost(self, rank: int) -> None:
        """The rank's worker is gone, and its KV arrays with it.

        Everything on the GPU is forgotten, on all ranks; the CPU tier stays. Running requests are void: they publish
        nothing any more; release them and match them again once `attach_kv` has brought new arrays.
        """
        if not 0 <= rank < self.config.transfer.tp_size:
            raise ConfigError(f"there is no rank {rank}; this cache has {self.config.transfer.tp_size}")
        self._client.kv_lost(rank)
        try:
            self._peers_lose_kv(rank)
        finally:
            self._forget_gpu(rank, has_kv=False)

    def layer_progress(self, rank: int) -> LayerProgress | None:
        """How far the rank's loads are, layer by layer, for its worker; None with `transfer_client = "inline"`."""
        self._check_rank(rank)
        return self._client.layer_progress(rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.config.transfer.tp_size:
            raise ConfigError(f"there is no rank {rank}; this cache has {self.config.transfer.tp_size}")
        if self.config.layout is None:
            raise ConfigError("this cache has no KV arrays; give its configuration a layout")

    def _forget_gpu(self, rank: int, *, has_kv: bool | None) -> None:
        """`has_kv`: whether its worker has attached the rank's KV arrays; None where that has not changed."""
        with self._lock:
            drop_gpu(self._tree)
            if has_kv:
                self._mover.ranks_without_kv.discard(rank)
            elif has_kv is not None and self.config.transfer.owner_of_kv == "worker":
                self._mover.ranks_without_kv.add(rank)
            self._cancel_peers("the KV arrays are lost")
            logger.info("event=gpu_forgotten rank=%d epoch=%d", rank, self._tree.epoch)
        self._submit()

    def _on_kv_lost(self, rank: int) -> None:
        try:
            self._peers_lose_kv(rank)
        finally:  # whatever else fails: what has gone must not be found
            self._forget_gpu(rank, has_kv=None)
        self._peers_attach_kv(rank)
        if (told := self._call_on_kv_lost) is not None:
            call_user(lambda: told(rank))

    def _cancel_peers(self, text: str) -> None:
        raise NotImplementedError

    def _peers_attach_kv(self, rank: int) -> None:
        raise NotImplementedError

    def _peers_lose_kv(self, rank: int) -> None:
        raise NotImplementedError

    def _submit(self) -> None:
        raise NotImplementedError
