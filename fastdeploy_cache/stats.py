"""A picture of the cache at one moment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from fastdeploy_cache.books.block_hash import namespace_label, root_hash
from fastdeploy_cache.books.block_pool import CALLER, CHECKPOINT, REQUEST, RUN, TASK, BlockPool
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.run import CPU, GPU, Tier
from fastdeploy_cache.books.tenants.shares import Shares
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.metrics.picture import EVICTION_KINDS, STORAGE_FATES, STORAGE_LOSSES, StorageCounts
from fastdeploy_cache.policies.breaker import BreakerState
from fastdeploy_cache.transfer_manager.client import ProcessHealth, RankStatus


@dataclass(frozen=True, kw_only=True)
class TierStats:
    """Blocks of one tier. `num_cached` are in the tree, of which `num_protected` are pinned and cannot be evicted; both
    count pages of checkpoints, too.

    `num_evicted` have gone since the start to make room.
    """

    num_blocks: int
    num_free: int
    num_cached: int
    num_protected: int
    num_private: int
    num_callers: int  # taken by an adapter's caller
    num_in_flight: int
    num_evicted: int
    num_evicted_by_kind: tuple[int, int]  # whose copy was kept, and dropped altogether

    @classmethod
    def of(cls, pool: BlockPool, residency: Residency, tier: Tier) -> TierStats:
        """Read the books of a tier."""
        num_pinned_pages = residency.checkpoints.num_pinned_pages if tier and residency.checkpoints is not None else 0
        return cls(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            num_cached=pool.count(RUN) + pool.count(CHECKPOINT),
            num_protected=residency.num_protected[tier] + num_pinned_pages,
            num_private=pool.count(REQUEST),
            num_callers=pool.count(CALLER),
            num_in_flight=pool.count(TASK),
            num_evicted=sum(residency.ages.num_evicted[tier]),
            num_evicted_by_kind=(residency.ages.num_evicted[tier][0], residency.ages.num_evicted[tier][1]),
        )

    @property
    def num_evictable(self) -> int:
        """Cached, and not pinned."""
        return self.num_cached - self.num_protected

    @property
    def num_available(self) -> int:
        """Free or evictable: less, while something is read that does not keep its block."""
        return self.num_free + self.num_evictable

    def by_state(self) -> dict[str, int]:
        """Every block in exactly one state."""
        return {
            "free": self.num_free,
            "evictable": self.num_evictable,
            "pinned": self.num_protected,
            "private": self.num_private + self.num_callers,
            "in_flight": self.num_in_flight,
        }


@dataclass(frozen=True, kw_only=True)
class RowStats:
    """Units of one row behind the full one, on the GPU. `num_held` are those of checkpoints, of which `num_pinned`
    cannot be evicted."""

    name: str
    num_units: int
    num_free: int
    num_held: int
    num_pinned: int
    num_private: int
    num_in_flight: int

    @classmethod
    def of(cls, name: str, units: UnitPool) -> RowStats:
        """Read the books of a row."""
        pool = units.pool
        return cls(
            name=name,
            num_units=pool.num_blocks,
            num_free=pool.num_free,
            num_held=pool.count(RUN),
            num_pinned=units.num_pinned,
            num_private=pool.count(REQUEST),
            num_in_flight=pool.count(TASK),
        )

    @classmethod
    def all_of(cls, rows: RowBooks | None) -> tuple[RowStats, ...]:
        """Each of a hybrid model; none of other models."""
        if rows is None:
            return ()
        pools = zip(rows.checkpoints.sizes.rows, rows.checkpoints.pools, strict=True)
        return tuple([cls.of(str(row), units) for row, units in pools])

    def by_state(self) -> dict[str, int]:
        """Every unit in exactly one state."""
        return {
            "free": self.num_free,
            "evictable": self.num_held - self.num_pinned,
            "pinned": self.num_pinned,
            "private": self.num_private,
            "in_flight": self.num_in_flight,
        }


@dataclass(frozen=True, kw_only=True)
class TenantStats:
    """What a tenant has, each by tier. It uses `num_used` blocks, of which it has `num_evictable` cached that nothing
    holds; it is guaranteed `num_guaranteed`, and has `num_most` at most."""

    namespace: str
    num_used: tuple[int, int]
    num_evictable: tuple[int, int]
    num_guaranteed: tuple[int, int]
    num_most: tuple[int, int]

    @classmethod
    def all_of(cls, shares: Shares | None) -> tuple[TenantStats, ...]:
        """Read the books of each, in the order of the tables; none where there are no tenants."""
        if shares is None:
            return ()
        return tuple(
            cls(
                namespace=namespace,
                num_used=(shares.num_used(GPU, tenant), shares.num_used(CPU, tenant)),
                num_evictable=(shares.num_loose[GPU][tenant], shares.num_loose[CPU][tenant]),
                num_guaranteed=shares.shares[tenant].num_guaranteed,
                num_most=shares.shares[tenant].num_most,
            )
            for namespace, tenant in shares.numbers.items()
        )

    def label(self, block_size: int) -> str:
        """What it is called where others see it."""
        return namespace_label(root_hash(self.namespace, block_size))

    def by_tier(self) -> dict[str, dict[str, int]]:
        """The same by the tier's name, for JSON."""
        counts = {
            "used": self.num_used,
            "evictable": self.num_evictable,
            "guaranteed": self.num_guaranteed,
            "most": self.num_most,
        }
        return {name: {key: each[tier] for key, each in counts.items()} for name, tier in (("gpu", GPU), ("cpu", CPU))}


@dataclass(frozen=True, kw_only=True)
class CheckpointStats:
    """Checkpoints of a hybrid model. By tier: those that are there now, and those that have left it since the start to
    make room, while another tier had them and while none had. And those that were made and refused since the start."""

    num_in: tuple[int, int] = (0, 0)
    num_evicted: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
    num_made: int = 0
    num_refused: int = 0

    @classmethod
    def of(cls, rows: RowBooks | None) -> CheckpointStats:
        """Read the books; of other models there are none."""
        if rows is None:
            return cls()
        counts = rows.counts
        gpu, cpu = counts.num_evicted
        return cls(
            num_in=(counts.num_in[0], counts.num_in[1]),
            num_evicted=((gpu[0], gpu[1]), (cpu[0], cpu[1])),
            num_made=rows.checkpoints.num_made,
            num_refused=counts.num_refused,
        )


@dataclass(frozen=True, kw_only=True)
class StorageTierStats:
    """The store below the CPU tier, as this engine sees it. Counts are since it was attached."""

    is_available: bool  # the processes of every rank have it open
    reading: BreakerState
    writing: BreakerState
    num_fetched_blocks: int
    num_unasked_blocks: int  # not asked for, as computing them is faster
    num_written_blocks: int
    num_skipped_blocks: int  # not written: declined, failed, or gone before
    num_fetched_checkpoints: int  # of a hybrid model: that came, with the blocks in front of them
    num_written_checkpoints: int
    num_evicted_objects: int  # by the stores themselves, of all ranks
    num_declined_objects: int  # kept out by admission, or for want of room
    num_damaged_objects: int  # whose bytes were not those that were written: never served, and removed
    num_full_disks: int  # ranks whose store writes less than it should now, as its disk has no room
    num_other_weights: int = 0  # other names of weights under which a file store keeps blocks like these
    num_prefetches: int = 0  # requests that were prefetched while some of their blocks were in no tier
    num_short_prefetches: int = 0  # of these, not asked for, as fewer than `min_prefetch_tokens` were missing
    num_unasked_requests: int = 0  # that were admitted while nobody has ever called `prefetch`
    num_long_unasked_requests: int = 0  # of these, long enough for a prefetch
    admission: str | None = None  # of a file store

    @property
    def sums(self) -> Counter[str]:
        """What only rises, by the names that metrics give it."""
        fates = self.num_fetched_blocks, self.num_unasked_blocks, self.num_written_blocks, self.num_skipped_blocks
        losses = self.num_evicted_objects, self.num_declined_objects, self.num_damaged_objects
        return Counter(dict(zip((*STORAGE_FATES, *STORAGE_LOSSES), (*fates, *losses), strict=True)))


@dataclass(frozen=True, kw_only=True)
class CacheStats:
    """See `PrefixCacheManager.stats`. `hit_rates` are of the sliding window: request, token, gpu, cpu, storage.

    `storage` is None where no store is attached. Transfers are between the tiers; sends and receives are to and from
    other instances.
    """

    gpu: TierStats
    cpu: TierStats
    storage: StorageTierStats | None
    storage_sums: Mapping[str, int]  # since the start, of all stores that were attached: see `StorageTierStats.sums`
    num_requests: int
    num_transfers_in_flight: int
    num_open_sends: int
    num_open_receives: int
    num_swapped_in_blocks: int
    num_swapped_out_blocks: int
    num_refused_transfers: Mapping[str, int]
    num_failed_steps: Mapping[str, int]  # that verbs took along and did without: see `Mishaps`
    num_hashed_blocks: int  # cached blocks whose hash somebody has asked for, and what computing these took
    hash_seconds: float
    num_quarantined_blocks: int  # of tasks that have ended and whose landing failed: nobody's, for good
    epoch: int
    hit_rates: Mapping[str, float]
    missed_tokens: Mapping[str, int]  # since the start, by cause
    saved_seconds: Mapping[str, float]  # since the start, by tier: of computing, by the prefill speed seen
    ranks: tuple[RankStatus, ...]
    processes: Mapping[str, tuple[RankStatus, ...]]  # of each kind (transfer, storage, peer) that there is
    rows: tuple[RowStats, ...] = ()  # behind the full one, of a hybrid model
    checkpoints: CheckpointStats = CheckpointStats()
    tenants: tuple[TenantStats, ...] = ()  # that the configuration names

    def _tiers(self) -> tuple[tuple[str, TierStats], ...]:
        return ("gpu", self.gpu), ("cpu", self.cpu)

    def block_counts(self) -> list[tuple[str, str, int]]:
        """Tier, state, blocks."""
        return [(name, state, n) for name, tier in self._tiers() for state, n in tier.by_state().items()]

    def eviction_counts(self) -> list[tuple[str, str, int]]:
        """Tier, kind, blocks evicted since the start."""
        return [
            (name, kind, n)
            for name, tier in self._tiers()
            for kind, n in zip(EVICTION_KINDS, tier.num_evicted_by_kind, strict=True)
        ]

    def unit_counts(self) -> list[tuple[str, str, int]]:
        """Row, state, units."""
        return [(row.name, state, n) for row in self.rows for state, n in row.by_state().items()]

    def tenant_counts(self, block_size: int) -> list[tuple[str, str, str, int]]:
        """Label, tier, kind, blocks."""
        tiers = [(each.label(block_size), *of_tier) for each in self.tenants for of_tier in each.by_tier().items()]
        return [(label, tier, kind, n) for label, tier, counts in tiers for kind, n in counts.items()]

    def rank_counts(self) -> list[tuple[int, bool, int]]:
        """Rank, whether it is up, restarts."""
        return [(status.rank, status.up, status.num_restarts) for status in self.ranks]

    def process_states(self) -> list[tuple[str, int, int]]:
        """Kind, rank, number of the state of each process, in the order of `ProcessHealth`."""
        numbers = {state: number for number, state in enumerate(ProcessHealth)}
        return [(kind, each.rank, numbers[each.state]) for kind, all_ in self.processes.items() for each in all_]

    def storage_counts(self) -> StorageCounts:
        """What became of blocks and objects, of the attached store and of those before it, and how it is."""
        tier, sums = self.storage, self.storage_sums
        blocks, objects = ({name: sums.get(name, 0) for name in names} for names in (STORAGE_FATES, STORAGE_LOSSES))
        counts = StorageCounts(blocks=blocks, objects=objects)
        if tier is None:
            return counts
        breakers = {"read": int(tier.reading), "write": int(tier.writing)}
        return counts._replace(is_up=tier.is_available, breakers=breakers, num_full_disks=tier.num_full_disks)
