"""The native cache behind the adapter, made from FastDeploy's configuration: anew with each launch and each size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from fastdeploy_cache.adapters.fastdeploy.config import cache_config, num_gpu_blocks, pool_size
from fastdeploy_cache.errors import RankStartError
from fastdeploy_cache.manager import PrefixCacheManager as NativeManager
from fastdeploy_cache.transfer_manager.client import RankStatus


class PeersLateError(RankStartError):
    """The ranks' peer processes were not ready in time."""


class CurrentCache:
    """`cache` is the one that there is now. The parts of the adapter look here in each call, and keep none."""

    def __init__(self, config: Any, *, tp_size: int, splitwise_role: str, data_parallel_id: int) -> None:
        """Make one without ranks: there is a GPU tier, and no other.

        Raises:
            ConfigError: an impossible setting.
        """
        self.their_config, self.splitwise_role = config, splitwise_role
        self._tp_size = tp_size
        self._ours = partial(cache_config, config, data_parallel_id=data_parallel_id, splitwise_role=splitwise_role)
        self._device_ids: Sequence[int] | None = None
        self._pod_ip = "127.0.0.1"
        self._num_blocks = num_gpu_blocks(config, splitwise_role)
        self.cache = NativeManager(self._ours(num_blocks=self._num_blocks, tp_size=tp_size))

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.cache.config.block_size

    def launch(self, device_ids: Sequence[int], tp_size: int, pod_ip: str) -> None:
        """Make one with ranks, and wait for them.

        Raises:
            ConfigError, CacheError: it cannot be; one without ranks took its place.
        """
        self._pod_ip = pod_ip
        self._replace(self._num_blocks, device_ids, tp_size, launched=True)
        self._device_ids = device_ids

    def resize(self, cache_config: Any, *, launched: bool) -> None:
        """Make one of the size that FastDeploy's `cache_config` has, which takes the place of the one before.

        Raises:
            ConfigError, CacheError: it cannot be; one of the old size, without ranks, took its place.
        """
        num_blocks, before = pool_size(cache_config), self.their_config.cache_config
        self.their_config.cache_config = cache_config
        try:
            self._replace(num_blocks, self._device_ids, self._tp_size, launched=launched)
        except BaseException:
            self.their_config.cache_config = before
            raise
        self._num_blocks = num_blocks

    def peer_statuses(self) -> Sequence[RankStatus]:
        """How the peer processes of the present cache are."""
        return self.cache.peers.statuses()

    def wait_for_peers(self, timeout_seconds: float) -> bool:
        """Those without KV arrays are not waited for: workers bring them, once they have seen the signals."""
        cache = self.cache
        return cache.config.transfer.owner_of_kv == "worker" or cache.peers.wait_ready(timeout_seconds)

    def _replace(self, num_blocks: int, device_ids: Sequence[int] | None, tp_size: int, *, launched: bool) -> None:
        """Close the old one first: both would need the memory, and a store's folder. Where the new one cannot be, one
        without ranks takes its place."""
        ours = self._ours(
            num_blocks=num_blocks, tp_size=tp_size, device_ids=device_ids, pod_ip=self._pod_ip, launched=launched
        )
        self.cache.close()
        try:
            self.cache = NativeManager(ours)
            if not self.wait_for_peers(0.0):  # the constructor has waited
                down = [status.rank for status in self.peer_statuses() if not status.up]
                late = f"peer processes of ranks {down} are not ready after {ours.transfer.start_timeout_seconds} s"
                raise PeersLateError(f"{late}; event=peers_late in this process's log says why")
        except BaseException:
            self.cache.close()
            self.cache = NativeManager(self._ours(num_blocks=self._num_blocks, tp_size=self._tp_size))
            raise
        self._tp_size = tp_size
