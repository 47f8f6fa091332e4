"""What a manager offers to the workers of its ranks: KV arrays and the progress of loads."""

from __future__ import annotations

from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import ConfigError
from transfer_manager.client import KVArrays, TransferClient
from transfer_manager.kv_memory import KVHandle, KVViews
from transfer_manager.rank_signal import LayerProgress


class RankAccess:
    """The part of `PrefixCacheManager` that is about ranks; any thread."""

    config: CacheConfig
    _client: TransferClient

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
        try:
            self._client.attach_kv(rank, kv)
        finally:  # what was computed while the arrays were missing, or on some that came too late, is nowhere
            self._forget_gpu(rank)
        self._peers_attach_kv(rank)

    def kv_lost(self, rank: int) -> None:
        """The rank's worker is gone, and its KV arrays with it.

        Everything on the GPU is forgotten, on all ranks; the CPU tier stays. Running requests are void: they publish
        nothing any more; release them and match them again once `attach_kv` has brought new arrays.
        """
        if not 0 <= rank < self.config.transfer.tp_size:
            raise ConfigError(f"there is no rank {rank}; this cache has {self.config.transfer.tp_size}")
        self._client.kv_lost(rank)
        self._peers_lose_kv(rank)
        self._forget_gpu(rank)

    def layer_progress(self, rank: int) -> LayerProgress | None:
        """How far the rank's loads are, layer by layer, for its worker; None with `transfer_client = "inline"`."""
        self._check_rank(rank)
        return self._client.layer_progress(rank)

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.config.transfer.tp_size:
            raise ConfigError(f"there is no rank {rank}; this cache has {self.config.transfer.tp_size}")
        if self.config.layout is None:
            raise ConfigError("this cache has no KV arrays; give its configuration a layout")

    def _forget_gpu(self, rank: int) -> None:
        raise NotImplementedError

    def _peers_attach_kv(self, rank: int) -> None:
        raise NotImplementedError

    def _peers_lose_kv(self, rank: int) -> None:
        raise NotImplementedError
