"""What each tenant has of a tier, and what of that may make room for whom."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from fastdeploy_cache.books.block_pool import RUN, BlockPool
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.run import ID_BYTES, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.tenants.labels import LabelledTable
from fastdeploy_cache.books.tenants.policies import last_use

REST: Final = 0  # every namespace that is no tenant's: they have one policy, and no guarantee


@dataclass(frozen=True, kw_only=True)
class TenantShare:
    """Blocks of each tier, by Tier: so many are kept for a tenant, and it has so many at most."""

    num_guaranteed: tuple[int, int]
    num_most: tuple[int, int]


class Shares:
    """Who may take what from whom. Tenants are numbers: 0 is the rest, and the last is what resets have forgotten.

    A tenant uses every block that was taken for it and is not free. What others need may be evicted from it as long as
    it uses more than is guaranteed to it; its own need may take all of its own. Nothing is reserved: what a tenant does
    not use of its guarantee others may cache in, and it has that back as soon as it asks, but for what running requests
    hold. A tenant that would use more than its most makes room among its own, or is refused.

    Whoever says no tenant (an adapter's calls without a request) is refused nothing: what is above the guarantees
    goes first, then the rest.

    Two taps, and who holds what, are told here. Under the lock.

    Attributes:
        numbers: of the tenants, by namespace.
        shares: by tenant, with the rest's.
        num_loose: by Tier and tenant, cached blocks that are not held.
    """

    def __init__(
        self,
        pools: tuple[BlockPool, BlockPool],
        tables: tuple[LabelledTable, LabelledTable],
        numbers: Mapping[str, int],
        shares: Sequence[TenantShare],
        policies: Sequence[GuardedPolicy],
    ) -> None:
        """Nothing is cached yet. `policies` and `shares` are by tenant, without the last; `tables` are by Tier."""
        self._pools, self._tables, self._policies = pools, tables, policies
        self.numbers, self.shares = numbers, shares
        self._gone, self._epoch = len(shares), 0
        self.num_loose = [[0] * (self._gone + 2) for _ in TIERS]  # and of forgotten namespaces: nobody's to take
        # The last use of what went last from each: what goes next was used later, so the lowest one is whose turn it is
        self._heads = [[0.0] * self._gone for _ in TIERS]

    # -- what is told

    def tenant_of(self, namespace: str) -> int:
        """The number of a namespace's tenant."""
        return self.numbers.get(namespace, REST)

    def label(self, ids: array[int], tier: Tier, tenant: int) -> None:
        """Blocks that have just been taken are a tenant's."""
        if tenant != REST:
            self._tables[tier].label(ids, tenant)

    def came(self, run: Run, tier: Tier, first: int, num_blocks: int) -> None:
        """See `Taps`. A caller's own blocks had no tenant before."""
        number, start = self._number(run), (first - run.cpu_start if tier else first) * ID_BYTES
        self.num_loose[tier][number] += num_blocks
        end, packed = start + num_blocks * ID_BYTES, run.cpu if tier else run.gpu
        with memoryview(packed) as whole, whole[start:end] as part, part.cast("i") as ids:  # a copy would need memory
            self._tables[tier].label(ids, number)

    def left(self, run: Run, tier: Tier, _first: int, num_blocks: int, _why: Loss) -> None:
        """See `Taps`."""
        self.num_loose[tier][self._number(run)] -= num_blocks

    def held(self, run: Run, tier: Tier, change: int) -> None:
        """So many more blocks of a run are held in a tier, or fewer."""
        self.num_loose[tier][self._number(run)] -= change

    def forgot(self, run: Run) -> None:
        """A run of this epoch is of a forgotten namespace from now on."""
        for tier in TIERS:
            num_loose = run.num_in(tier, run.num_blocks) - run.num_in(tier, run.num_held)
            self.num_loose[tier][self._number(run)] -= num_loose
            self.num_loose[tier][self._gone + 1] += num_loose

    def _number(self, run: Run) -> int:
        if run.epoch == self._epoch:
            return run.tenant
        return self._gone if run.epoch >= 0 else self._gone + 1

    def begin_epoch(self, epoch: int) -> None:
        """What is cached now is nobody's any more: it goes before everything else."""
        self._epoch = epoch
        for tier in TIERS:
            loose = self.num_loose[tier]
            loose[self._gone], loose[: self._gone] = sum(loose[: self._gone + 1]), [0] * self._gone
            self._tables[tier].forget_runs()

    # -- who may have what

    def num_used(self, tier: Tier, tenant: int) -> int:
        """Blocks of a tier that a tenant uses."""
        return self._tables[tier].num_used[tenant]

    def most_blocks(self, tier: Tier, tenant: int) -> int:
        """So many blocks of a tier one request of the tenant can have for certain, when nothing else runs."""
        others = sum(each.num_guaranteed[tier] for number, each in enumerate(self.shares) if number != tenant)
        return min(self.shares[tenant].num_most[tier], self._pools[tier].num_blocks - others)

    def num_available(self, tier: Tier, tenant: int) -> int:
        """Blocks of a tier that are free, or can be evicted, for a tenant now."""
        pool, loose = self._pools[tier], self.num_loose[tier]
        num_evictable = loose[self._gone] + sum([self._num_to_give(tier, each, tenant) for each in range(self._gone)])
        num_own, num_read = loose[tenant], pool.num_read if tier else pool.num_read_of(RUN)
        if num_read:  # as in `Residency.num_available`
            num_evictable, num_own = max(0, num_evictable - num_read), max(0, num_own - num_read)
        num_left = self.shares[tenant].num_most[tier] - self.num_used(tier, tenant) + num_own
        return max(0, min(pool.num_free + num_evictable, num_left))

    def room(self, tier: Tier) -> tuple[int, ...]:
        """Whatever `num_available` follows from: another one when somebody may have more, or less."""
        return (*self._tables[tier].num_used, *self.num_loose[tier], self._pools[tier].num_read)

    def num_below_most(self, tier: Tier, tenant: int) -> int:
        """So many more blocks a tenant may use without giving any of its own."""
        return max(0, self.shares[tenant].num_most[tier] - self.num_used(tier, tenant))

    def _num_to_give(self, tier: Tier, giver: int, taker: int | None) -> int:
        """Blocks that a tenant may lose for another, or for itself."""
        num_loose = self.num_loose[tier][giver]
        if giver == taker or num_loose <= 0:
            return num_loose
        return min(num_loose, max(0, self.num_used(tier, giver) - self.shares[giver].num_guaranteed[tier]))

    # -- who gives it

    def next_victim(self, tier: Tier, num_blocks: int, tenant: int | None) -> tuple[Run, int] | None:
        """The leaf that gives blocks next, and how many at most, so that a tenant can have `num_blocks`; None where it
        can, or nothing may go. What resets have forgotten has been freed before."""
        pool = self._pools[tier]
        if tenant is not None:
            num_over = self.num_used(tier, tenant) + num_blocks - self.shares[tenant].num_most[tier]
            if num_over > 0 and self.num_loose[tier][tenant] > 0:
                return self._policies[tenant].victim(tier, num_over)
        num_short = num_blocks - pool.num_free
        if num_short <= 0:
            return None
        to_give = [self._num_to_give(tier, each, None) for each in range(self._gone)]
        if not any(to_give):  # who asks gives its own only now: what is guaranteed to it is not worth less to it
            loose = self.num_loose[tier][: self._gone]
            to_give = loose if tenant is None else [count * (each == tenant) for each, count in enumerate(loose)]
        return self._whose_turn(tier, num_short, to_give)

    def _whose_turn(self, tier: Tier, num_short: int, to_give: list[int]) -> tuple[Run, int] | None:
        """The leaf that was used longest ago, of those that the tenants' policies name."""
        heads, givers = self._heads[tier], [number for number, count in enumerate(to_give) if count > 0]
        while givers:  # each turn puts a head right, if it is not the last
            number = min(givers, key=lambda each: (heads[each], -to_give[each]))  # alike: who can give most
            known, num_most = heads[number], min(num_short, to_give[number])
            run, at_most = self._policies[number].victim(tier, num_most)
            heads[number] = last_use(run)
            if heads[number] <= known or heads[number] <= min([heads[each] for each in givers]):
                return run, min(at_most, num_most)
        return None

    def check(self, runs: Sequence[Run]) -> None:
        """Raise `AssertionError` where a count is not what the runs and the pools say."""
        for tier in TIERS:
            num_loose = [0] * (self._gone + 2)
            for run in runs:
                num_loose[self._number(run)] += run.num_in(tier, run.num_blocks) - run.num_in(tier, run.num_held)
            assert self.num_loose[tier] == num_loose, (tier, "loose blocks by tenant", self.num_loose[tier], num_loose)
            used = self._tables[tier].num_used
            assert used == self._tables[tier].counted(), (tier, "used blocks by tenant", used)
