"""The client and the books that the configuration asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoints import RowSizes
from fastdeploy_cache.books.leaves.policy import EvictionPolicy
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.policies import check_policy, new_policy
from fastdeploy_cache.policies.eviction import RANKING_POLICIES
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient


def check_given(policy: EvictionPolicy | None) -> None:
    """Raise `ConfigError` for a policy that is none."""
    check_policy(policy)


def new_client(config: CacheConfig, clock: Clock) -> TransferClient:
    """Rank processes where there is a tier below the GPU to serve, or arrays on a GPU; else the in-process client.

    Raises:
        DeviceError: the device's driver is not here.
        StorageRefusedError: the folder of the configured store cannot be used: no memory is taken for it.
        NotEnoughMemoryError: the pools do not fit.
    """
    if config.storage is not None:
        from fastdeploy_cache.transfer_manager.storage.file_place import check_place

        check_place(config.storage)
    layout, (num_gpu_blocks, num_cpu_blocks) = config.rank_layout(), config.pool_sizes()
    transfer = config.transfer
    needs_ranks = num_cpu_blocks or transfer.owner_of_kv != "engine"
    if config.transfer_client == "processes" and needs_ranks:
        from fastdeploy_cache.transfer_manager.device.presence import check_presence
        from fastdeploy_cache.transfer_manager.rank.client import RankClient  # late: one of the two is needed

        assert layout is not None
        check_presence(transfer.device)
        return RankClient(transfer, layout, num_gpu_blocks, num_cpu_blocks, clock)
    from fastdeploy_cache.transfer_manager.rank.inline_client import InlineClient

    own_kv = transfer.owner_of_kv != "worker"
    return InlineClient(layout, num_gpu_blocks, num_cpu_blocks, transfer.tp_size, own_kv, clock=clock)


def new_books(config: CacheConfig, policy: EvictionPolicy | None, clock: Clock) -> Books:
    """Books of free blocks, as many as the configuration says. `policy` replaces the one of that name."""
    sizes, size = config.pool_sizes(), config.block_size
    if policy is None:
        num_bytes = config.eviction_history_bytes
        policy = new_policy(
            config.eviction_policy, clock.age, num_blocks=max(sizes), block_tokens=size, history_bytes=num_bytes
        )
    pools = (BlockPool("GPU", sizes[0]), BlockPool("CPU", sizes[1]))
    tree = PrefixTree(size, pools, policy, config.lost_blocks_bytes, clock)
    books, layout = Books(tree, clock), config.rank_layout()
    if layout is not None and layout.rows:
        books.rows = _new_rows(config, tree, layout, clock)
    return books


def _new_rows(config: CacheConfig, tree: PrefixTree, layout: RankLayout, clock: Clock) -> RowBooks:
    """The pools of the rows behind the full one. Checkpoints are ranked as runs are, and by `lru` where what ranks runs
    learns from their blocks, or is somebody's own."""
    rows = layout.rows[1:]
    sizes = RowSizes(rows, [layout.unit_bytes(1 + number) for number in range(len(rows))], layout.block_bytes)
    pools = [UnitPool(f"GPU {row}", units) for row, units in zip(rows, config.unit_counts(), strict=True)]
    ranking = RANKING_POLICIES.get(tree.policy.name, RANKING_POLICIES["lru"])
    return RowBooks(tree, sizes, pools, ranking(clock.age), clock)
