"""The client and the books that the configuration asks for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoints import RowSizes
from fastdeploy_cache.books.id_table import new_id_table
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.leaves.policy import EvictionPolicy, LeastRecentlyUsed
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import Run
from fastdeploy_cache.books.tenants.labels import LabelledTable
from fastdeploy_cache.books.tenants.policies import TenantPolicies
from fastdeploy_cache.books.tenants.shares import Shares, TenantShare
from fastdeploy_cache.books.tenants.sharing import share_out
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.config.cache import CacheConfig
from fastdeploy_cache.config.tenants import TenantConfig, check_policies, tier_tenants
from fastdeploy_cache.ipc.clock import Clock
from fastdeploy_cache.policies import MIN_HISTORY_BYTES, check_policy, new_policy
from fastdeploy_cache.policies.eviction import RANKING_POLICIES
from fastdeploy_cache.transfer_manager.kv.layout import RankLayout

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.rank.transfer_client import TransferClient


def check_given(config: CacheConfig, policy: EvictionPolicy | None) -> None:
    """Raise `ConfigError` for a policy that is none, or cannot be that of all tenants."""
    check_policy(policy)
    check_policies(tier_tenants(config.tenants), is_given=policy is not None)


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
    if tenants := tier_tenants(config.tenants):
        tree = _new_shared_tree(config, tenants, sizes, clock)
    else:
        policy = policy if policy is not None else _named_policy(config, clock, max(sizes))
        pools = (BlockPool("GPU", sizes[0]), BlockPool("CPU", sizes[1]))
        tree = PrefixTree(size, pools, policy, config.lost_blocks_bytes, clock)
    books, layout = Books(tree, clock), config.rank_layout()
    if layout is not None and layout.rows:
        books.rows = _new_rows(config, tree, layout, clock)
    return books


def _named_policy(config: CacheConfig, clock: Clock, num_blocks: int, num_policies: int = 1) -> LeastRecentlyUsed:
    num_bytes = max(MIN_HISTORY_BYTES, config.eviction_history_bytes // num_policies)
    name, size = config.eviction_policy, config.block_size
    return new_policy(name, clock.age, num_blocks=num_blocks, block_tokens=size, history_bytes=num_bytes)


def _new_shared_tree(
    config: CacheConfig, tenants: Sequence[TenantConfig], sizes: tuple[int, int], clock: Clock
) -> PrefixTree:
    """A tree in which each tenant has its share, and a policy of its own; so has the rest, which is the first."""
    num_tenants = 1 + len(tenants)
    tables = [LabelledTable(new_id_table(num_blocks), num_tenants + 1) for num_blocks in sizes]
    pools = (BlockPool("GPU", sizes[0], lambda _: tables[0]), BlockPool("CPU", sizes[1], lambda _: tables[1]))
    chosen = [_named_policy(config, clock, max(sizes), num_tenants) for _ in range(num_tenants)]
    tree = PrefixTree(config.block_size, pools, chosen[0], config.lost_blocks_bytes, clock)
    policies = [
        GuardedPolicy(policy, tree.mishaps, partial(_runs_of, tree, tenant), clock)
        for tenant, policy in enumerate(chosen)
    ]
    shares = [TenantShare(num_guaranteed=(0, 0), num_most=sizes)]
    for tenant in tenants:
        guaranteed = tenant.guaranteed_gpu_share, tenant.guaranteed_cpu_share
        most = tenant.max_gpu_share, tenant.max_cpu_share
        shares.append(TenantShare(num_guaranteed=_blocks_in(guaranteed, sizes), num_most=_blocks_in(most, sizes)))
    numbers = {tenant.namespace: 1 + place for place, tenant in enumerate(tenants)}
    share_out(tree, Shares(pools, (tables[0], tables[1]), numbers, shares, policies), TenantPolicies(policies))
    return tree


def _blocks_in(of_tiers: tuple[float, float], sizes: tuple[int, int]) -> tuple[int, int]:
    return int(of_tiers[0] * sizes[0]), int(of_tiers[1] * sizes[1])


def _runs_of(tree: PrefixTree, tenant: int) -> Iterator[Run]:
    return (run for run in tree.runs() if run.tenant == tenant)


def _new_rows(config: CacheConfig, tree: PrefixTree, layout: RankLayout, clock: Clock) -> RowBooks:
    """The pools of the rows behind the full one. Checkpoints are ranked as runs are, and by `lru` where what ranks runs
    learns from their blocks, or is somebody's own."""
    rows = layout.rows[1:]
    sizes = RowSizes(rows, [layout.unit_bytes(1 + number) for number in range(len(rows))], layout.block_bytes)
    pools = [UnitPool(f"GPU {row}", units) for row, units in zip(rows, config.unit_counts(), strict=True)]
    ranking = RANKING_POLICIES.get(tree.policy.name, RANKING_POLICIES["lru"])
    return RowBooks(tree, sizes, pools, ranking(clock.age), clock)
