"""What a manager is put together from, by its configuration."""

from __future__ import annotations

from collections.abc import Callable

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.config import CacheConfig
from fastdeploy_cache.errors import LayoutError
from fastdeploy_cache.metrics.cache_metrics import CacheMetrics
from fastdeploy_cache.movement.block_mover import BlockMover
from fastdeploy_cache.movement.copy_down import CopyDown
from fastdeploy_cache.policies import new_policy
from fastdeploy_cache.policies.breaker import Breaker
from fastdeploy_cache.policies.eviction import EvictionPolicy
from fastdeploy_cache.policies.load_or_compute import LoadOrCompute
from fastdeploy_cache.requests.matcher import Matcher
from fastdeploy_cache.storage.link import StorageLink
from fastdeploy_cache.storage.prefetch import StorageLimits
from fastdeploy_cache.storage.tier import StorageTier
from fastdeploy_cache.transfer_manager.kv.memory import KVHandle
from fastdeploy_cache.transfer_manager.peer.client import PeerProcesses
from fastdeploy_cache.transfer_manager.peer.config import PeerConfig
from fastdeploy_cache.transfer_manager.rank.client import RankClient
from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient
from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient
from fastdeploy_cache.transfer_manager.storage.client import StorageClient
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_place import check_place
from fastdeploy_cache.transfer_manager.task import TransferResult


def new_policy_of(config: CacheConfig, clock: Callable[[], float]) -> EvictionPolicy:
    """The configured eviction policy."""
    return new_policy(
        config.eviction_policy,
        clock,
        num_blocks=max(config.pool_sizes()),
        block_tokens=config.block_size,
        history_bytes=config.eviction_history_bytes,
    )


def new_metrics(config: CacheConfig, clock: Callable[[], float]) -> CacheMetrics:
    """What counts for Prometheus."""
    return CacheMetrics(
        tp_size=config.transfer.tp_size,
        data_parallel_id=config.transfer.data_parallel_id,
        window_seconds=config.hit_rate_window_seconds,
        clock=clock,
    )


def new_client(config: CacheConfig) -> TransferClient:
    """Rank processes where there is a tier below the GPU to serve, or arrays on a GPU; else the in-process client.

    Raises:
        StorageRefusedError: the folder of the configured store cannot be used: no memory is taken for it.
        NotEnoughMemoryError: the pools do not fit.
    """
    check_place(config.storage)
    layout, (num_gpu_blocks, num_cpu_blocks) = config.rank_layout(), config.pool_sizes()
    transfer = config.transfer
    needs_ranks = num_cpu_blocks or transfer.owner_of_kv != "engine"
    if config.transfer_client == "processes" and needs_ranks:
        assert layout is not None
        return RankClient(transfer, layout, num_gpu_blocks, num_cpu_blocks)
    own_kv = transfer.owner_of_kv != "worker"
    return InlineClient(layout, num_gpu_blocks, num_cpu_blocks, transfer.tp_size, own_kv)


def new_peer_client(config: CacheConfig, peer: PeerConfig, instance_id: bytes, ranks: TransferClient) -> PeerProcesses:
    """A process for each rank, over its KV arrays. Raises `PeerRefusedError`."""
    layout, handles = config.rank_layout(), list[KVHandle | None]()
    assert layout is not None
    for rank in range(config.transfer.tp_size):
        try:
            handles.append(ranks.kv_handle(rank))
        except LayoutError:  # its worker has not attached them yet
            handles.append(None)
    return PeerProcesses(
        peer,
        config.transfer,
        instance_id=instance_id,
        layout=layout,
        num_gpu_blocks=config.pool_sizes()[0],
        kv=handles,
    )


def new_speeds(config: CacheConfig) -> LoadOrCompute:
    """What decides between loading and computing."""
    return LoadOrCompute(config.load_policy, config.prefill_tokens_per_second, config.block_bytes(), config.block_size)


def new_storage(
    config: CacheConfig,
    storage: StorageConfig,
    tree: PrefixTree,
    client: StorageClient,
    *,
    speeds: LoadOrCompute,
    on_result: Callable[[TransferResult], None],
) -> StorageTier:
    """The tier over a store whose client is started with `on_result`."""
    size = config.block_size
    limits = StorageLimits.of(
        config.pool_sizes()[1],
        config.block_bytes(),
        min_blocks=-(-config.min_prefetch_tokens // size),
        max_share=config.max_prefetch_share,
    )
    speeds.forget_storage()
    reading, writing = (Breaker(storage.breaker_failures, storage.breaker_seconds) for _ in range(2))
    link = StorageLink(
        tree,
        client,
        speeds,
        breakers=(reading, writing),
        task_timeout_seconds=storage.task_timeout_seconds,
        on_result=on_result,
    )
    return StorageTier(tree, link, limits)


def new_matcher(
    config: CacheConfig, tree: PrefixTree, mover: BlockMover, speeds: LoadOrCompute
) -> tuple[CopyDown, Matcher]:
    """The steps of the verbs, and the write policy that they tell."""
    copy_down = CopyDown(
        tree,
        mover,
        policy=config.cpu_write_policy,
        high_water=config.cpu_write_high_water,
        min_uses=config.cpu_write_min_uses,
        block_bytes=config.block_bytes(),
    )
    matcher = Matcher(
        tree,
        mover,
        copy_down,
        recompute_last_token=config.recompute_last_token,
        load_limits=config.load_limits(),
        speeds=speeds,
    )
    return copy_down, matcher
