"""Which blocks of each run are in which tier, which are held there, and which go when room is short."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from fastdeploy_cache.books.ages import Ages
from fastdeploy_cache.books.block_pool import CHECKPOINT, RUN, BlockPool
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.books.graves import Graves
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.lost_blocks import LostBlocks
from fastdeploy_cache.books.run import CPU, GPU, ID_BYTES, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss, Taps
from fastdeploy_cache.books.tenants.policies import TenantPolicies
from fastdeploy_cache.books.tenants.shares import Shares
from fastdeploy_cache.ipc.clock import Clock

Pools = tuple[BlockPool, BlockPool]  # by Tier
FORGOTTEN = -1  # an epoch of its own: of what a forgotten namespace has left, which is no room for anybody
Policy = GuardedPolicy | TenantPolicies  # the last where there are tenants


class Residency:
    """The ids of all runs, their sums and what is held: the bookkeeping beneath `PrefixTree`.

    Residency is prefix-closed: what is on the GPU has its parent on the GPU, and what is anywhere has its parent in
    some tier. Of a run, the blocks up to its last pin are held: neither they nor their copies are evicted. With a pin
    anywhere beneath it, all of it is held.
    """

    def __init__(self, pools: Pools, policy: Policy, lost: LostBlocks, clock: Clock, block_bytes: int) -> None:
        self.pools = pools  # by Tier
        self.lost, self.policy = lost, policy
        self.shares: Shares | None = None  # where there are tenants
        self.epoch = 0
        self.num_protected = [0, 0]  # held blocks by Tier
        self.num_doomed = [0, 0]  # by Tier, blocks of forgotten namespaces that nobody holds: to be wiped, not evicted
        self.block_bytes = block_bytes
        self._forgotten_by = Loss.RESET  # what is of an older epoch
        self.graves = Graves(self._forget, pools)
        self.ages = Ages(clock.now)
        self.checkpoints: Checkpoints | None = None  # behind the full one, where there are any
        self.trim: Callable[[Run, Loss], None] | None = None  # see `Trimmer`
        self.make_room: Callable[[Tier, int], None] | None = None  # see `RowEviction`
        self.taps = Taps(began=(self.ages.began,), left=(self.ages.left,), ended=(self.lost.ended,))

    def num_available(self, tier: Tier, tenant: int | None = None) -> int:
        """Blocks of a tier that are free or can be evicted now: for a tenant, where there are any and one is named."""
        if tenant is not None and self.shares is not None:
            return self.shares.num_available(tier, tenant)
        pool = self.pools[tier]
        count = pool.count
        num_evictable = count(RUN) - self.num_protected[tier] - self.num_doomed[tier]
        if tier and self.checkpoints is not None:
            num_evictable += count(CHECKPOINT) - self.checkpoints.num_pinned_pages
        if pool.num_read:  # frees nothing yet; some of it may be held, too, and on the GPU most is a caller's own
            num_evictable = max(0, num_evictable - (pool.num_read if tier else pool.num_read_of(RUN)))
        return pool.num_free + num_evictable

    def is_leaf(self, run: Run, tier: Tier) -> bool:
        """Whether the run may lose its tail in that tier: blocks there, not held, none beneath, still in the tree."""
        if tier:
            has_loose, num_children = bool(run.cpu) and run.cpu_end > run.num_held, run.num_cpu_children
        else:
            has_loose, num_children = len(run.gpu) > run.num_held * ID_BYTES, run.num_gpu_children
        return has_loose and not num_children and run.epoch == self.epoch and run.parent is not None

    def key(self, run: Run) -> bytes:
        """What its parent finds a run under: its first block's tokens and extra key."""
        tokens = bytes(run.tokens[: self.block_bytes])
        return tokens if run.extras is None else tokens + run.extras.get(0, b"")

    # -- what is where

    def add_ids(self, run: Run, tier: Tier, ids: array[int]) -> None:
        """More blocks at the end of the run's interval in a tier."""
        run.add_ids(tier, ids)
        self.added_ids(run, tier, len(ids))

    def added_ids(self, run: Run, tier: Tier, num_ids: int, *, is_offered: bool = True) -> None:
        """Count what has been added at the end of the run's interval in a tier. Not `is_offered`: the caller pins it
        now, and it takes part in eviction when it is let go. Offered before its first use, it would have the lowest
        rank of all, and the first eviction would have to put every such entry right."""
        end = run.num_gpu if tier is GPU else run.cpu_end
        if num_ids * ID_BYTES == len(run.packed_ids(tier)):
            self.count_child(run, tier, 1)
            for began in self.taps.began:
                began(run, tier, end - num_ids, num_ids)
        for came in self.taps.came:
            came(run, tier, end - num_ids, num_ids)
        if num_held := max(0, min(end, run.num_held) - (end - num_ids)):
            self.count_held(run, tier, num_held)
        if is_offered:
            self.offer(run, tier)

    def take_copies(self, run: Run, why: Loss) -> bytes | bytearray:
        """All of a run's copies, packed, which are another's from now on; the books of this one are put right."""
        self.count_held(run, CPU, -run.num_in(CPU, run.num_held))
        packed, first = run.cpu, run.cpu_start
        run.cpu, run.cpu_start = b"", 0
        self.count_child(run, CPU, -1)
        for left in self.taps.left:
            left(run, CPU, first, len(packed) // ID_BYTES, why)
        return packed

    def free_tail(self, run: Run, tier: Tier, num_left: int, why: Loss) -> None:
        """Give the run's ids in a tier behind the first `num_left` back; none of them is held."""
        num_gone = len(run.cpu if tier else run.gpu) // ID_BYTES - num_left
        if num_gone > 0:
            if run.epoch == FORGOTTEN:
                self.num_doomed[tier] -= num_gone
            run.free_ids(tier, num_left, self.pools[tier])
            if not num_left:
                self.count_child(run, tier, -1)
            for left in self.taps.left:
                left(run, tier, run.cpu_start * tier + num_left, num_gone, why)

    def count_child(self, run: Run, tier: Tier, change: int) -> None:
        """`run` began (1) or ceased (-1) to have blocks in a tier."""
        parent = run.parent
        if change and parent is not None:
            if tier:
                parent.num_cpu_children += change
            else:
                parent.num_gpu_children += change
            if not parent.num_children_in(tier):
                self.offer(parent, tier)
            elif change > 0 and self._is_queued(parent, tier):
                self.policy.pull(parent, tier)

    def offer(self, run: Run, tier: Tier) -> None:
        """Let a run take part in a tier's eviction where it is a leaf there."""
        if self.is_leaf(run, tier):
            self.policy.push(run, tier)

    def withdraw(self, run: Run) -> None:
        """A run is gone: it takes part in no tier's eviction any more."""
        if run.epoch == self.epoch:
            for tier in TIERS:
                if self._is_queued(run, tier):
                    self.policy.pull(run, tier)

    def _is_queued(self, run: Run, tier: Tier) -> bool:
        """Whether the policy may count the run among the leaves of a tier."""
        return (run.queued_cpu if tier else run.queued_gpu) is not None or not self.policy.has_marks

    # -- what is held

    def count_held(self, run: Run, tier: Tier, change: int) -> None:
        """So many more blocks of a run are held in a tier, or fewer."""
        self.num_protected[tier] += change
        if self.shares is not None:
            self.shares.held(run, tier, change)
        if run.epoch == FORGOTTEN:
            self.num_doomed[tier] -= change

    def hold(self, run: Run) -> None:
        """Count anew what of a run is held, after its pins or its children's have changed, and so on upwards."""
        while True:
            before, pins = run.num_held, run.pins
            if run.num_held_children:
                held = run.num_blocks
            elif not pins:
                held = 0
            elif len(pins) == 1:
                held = pins[0].end
            else:
                held = max([pin.end for pin in pins])
            if held == before:
                return
            num_gpu, parent = len(run.gpu) // ID_BYTES, run.parent
            assert parent is not None
            # as in `evicting.evict_tail`, a call of min() would cost more than all the rest
            more = (held if held < num_gpu else num_gpu) - (before if before < num_gpu else num_gpu)  # noqa: FURB136
            if self.shares is not None or run.epoch == FORGOTTEN:
                self.count_held(run, GPU, more)
            else:
                self.num_protected[0] += more
            if run.cpu:
                start, end = run.cpu_start, run.cpu_end
                self.count_held(run, CPU, max(start, min(held, end)) - max(start, min(before, end)))
            run.num_held = held
            if held < before:
                self._let_go(run)
            if (held and before) or parent.parent is None:
                return
            parent.num_held_children += 1 if held else -1
            run = parent

    def _let_go(self, run: Run) -> None:
        """Less of a run is held: it may be evicted from now on or, where it is of an older epoch, is freed."""
        if run.epoch == self.epoch:
            self.offer(run, GPU)
            if run.cpu:
                self.offer(run, CPU)
        elif not run.children and not self.graves.is_open(run):  # else it goes behind what is below it
            self._forget(run)

    # -- what goes

    def unlink(self, run: Run, parent: Run) -> None:
        """Take a run out of the tree, of which nothing is in any tier."""
        parent.remove_child(self.key(run))
        run.forget()

    def end_of(self, run: Run) -> int:
        """Where a run may end: behind its last block in a tier and, in an earlier epoch, behind what is held of it."""
        num_gpu = len(run.gpu) // ID_BYTES
        end = run.cpu_end if run.cpu and run.cpu_start <= num_gpu < run.cpu_end else num_gpu
        return end if run.epoch == self.epoch else run.num_held

    def truncate(self, run: Run, num_blocks: int, why: Loss) -> None:
        """End a run after `num_blocks` blocks, of which none behind is held, and drop everything beneath it."""
        if num_blocks == run.num_blocks:
            return
        for ended in self.taps.ended:
            ended(run, num_blocks, why)
        if self.policy.hears_losses and run.epoch == self.epoch:
            self.policy.shrink(run, num_blocks)
        if self.checkpoints is not None:
            self.checkpoints.drop_behind(run, num_blocks, why)
        if run.children:
            for child in list(run.children.values()):
                self._remove_subtree(child, why)
        if not num_blocks:
            self._remove(run, why)
            return
        if len(run.gpu) > num_blocks * ID_BYTES:
            self.free_tail(run, GPU, num_blocks, why)
        if run.cpu:
            self.free_tail(run, CPU, run.num_in(CPU, num_blocks), why)
        run.cut(num_blocks, self.block_bytes)

    def _forget(self, run: Run) -> None:
        """End a run of an older epoch where it may end."""
        self.truncate(run, self.end_of(run), self._forgotten_by)
        if self.checkpoints is not None:
            self.checkpoints.drop_unpinned(run, self._forgotten_by)

    def _remove_subtree(self, run: Run, why: Loss) -> None:
        below = [run]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below):
            for ended in self.taps.ended:
                ended(node, 0, why)
            if self.policy.hears_losses and node.epoch == self.epoch:
                self.policy.shrink(node, 0)
            self._remove(node, why)

    def _remove(self, run: Run, why: Loss) -> None:
        """Free what a childless run still has and unlink it."""
        assert run.parent is not None and not run.children and not run.num_held
        if self.checkpoints is not None:
            self.checkpoints.drop_behind(run, 0, why)
        self.free_tail(run, GPU, 0, why)
        self.free_tail(run, CPU, 0, why)
        self.withdraw(run)
        self.unlink(run, run.parent)

    def begin_epoch(self, lost_by: Loss) -> None:
        """What is in the tree now is of the past: it is never evicted, only removed."""
        self.epoch += 1
        self._forgotten_by = lost_by
        if self.shares is not None:
            self.shares.begin_epoch(self.epoch)
        if self.checkpoints is not None:
            self.checkpoints.begin_epoch()
