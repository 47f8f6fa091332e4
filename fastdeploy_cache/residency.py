"""Which blocks of each run are in which tier, and which go when room is short."""

from __future__ import annotations

from array import array
from collections.abc import Callable

from fastdeploy_cache.block_hash import HASH_BYTES
from fastdeploy_cache.block_pool import BlockPool, Owner
from fastdeploy_cache.policies.eviction import LeastRecentlyUsed
from fastdeploy_cache.run import Run, Tier

OnEvict = Callable[[Tier, int, int], None]  # tier, blocks of which a copy remains, blocks dropped


class Residency:
    """The ids of all runs, their sums and the eviction queues: the bookkeeping beneath `PrefixTree`.

    Residency is prefix-closed: what is on the GPU has its parent on the GPU, and what is anywhere has its parent in
    some tier. A run with pins anywhere beneath it is protected: neither its blocks nor its copies are evicted.
    """

    def __init__(self, block_bytes: int, pools: tuple[BlockPool, BlockPool], on_evict: OnEvict) -> None:
        self.pools = pools  # by Tier
        self.epoch = 0
        self.num_protected = [0, 0]  # by Tier
        self._block_bytes = block_bytes
        self._on_evict = on_evict
        self._queues = self._new_queues()

    def num_evictable(self, tier: Tier) -> int:
        """Blocks of a tier that `evict` can free now."""
        return self.pools[tier].count(Owner.RUN) - self.num_protected[tier]

    def is_leaf(self, run: Run, tier: Tier) -> bool:
        """Whether the run may lose its tail in that tier: blocks there, none beneath, no pin, still in the tree."""
        return (
            not run.pins
            and bool(run.ids[tier])
            and not run.num_children_in[tier]
            and run.parent is not None
            and run.epoch == self.epoch
        )

    def key(self, run: Run) -> bytes:
        """What its parent finds a run under: its first block's tokens."""
        return bytes(run.tokens[: self._block_bytes])

    def set_ids(self, run: Run, tier: Tier, ids: array[int]) -> None:
        """The one place where a run's ids change: keeps the sums and the eviction queues right."""
        before = len(run.ids[tier])
        run.ids[tier] = ids
        if run.pins:
            self.num_protected[tier] += len(ids) - before
        self.count_child(run, tier, bool(ids) - bool(before))
        self.offer(run)

    def count_child(self, run: Run, tier: Tier, change: int) -> None:
        """`run` began (1) or ceased (-1) to have blocks in a tier."""
        if change and run.parent is not None:
            run.parent.num_children_in[tier] += change
            self.offer(run.parent)

    def offer(self, run: Run) -> None:
        """Let a run take part in eviction, in each tier where it is a leaf."""
        for tier in Tier:
            if self.is_leaf(run, tier):
                self._queues[tier].push(run)

    def protect(self, run: Run, sign: int) -> None:
        """A run got its first pin (1) or lost its last (-1)."""
        for tier in Tier:
            self.num_protected[tier] += sign * len(run.ids[tier])

    def evict(self, tier: Tier, num_blocks: int) -> None:
        """Free exactly `num_blocks` of a tier, the least recently used first. The caller has checked the number."""
        assert num_blocks <= self.num_evictable(tier)
        while num_blocks > 0:
            run = self._queues[tier].oldest()
            taken = min(num_blocks, len(run.ids[tier]))
            kept = self._evict_gpu_tail(run, taken) if tier is Tier.GPU else self._evict_cpu_tail(run, taken)
            self._on_evict(tier, kept, taken - kept)
            num_blocks -= taken

    def _evict_gpu_tail(self, run: Run, num_blocks: int) -> int:
        """Returns of how many blocks a CPU copy remains."""
        num_gpu = run.num_gpu - num_blocks
        end = run.cpu_end if run.cpu_start <= num_gpu < run.cpu_end else num_gpu
        num_kept = min(end, run.num_gpu) - num_gpu
        self._free_tail(run, Tier.GPU, num_gpu)
        self._truncate(run, end)
        return num_kept

    def _evict_cpu_tail(self, run: Run, num_blocks: int) -> int:
        """Returns of how many blocks a GPU copy remains."""
        cpu_end = run.cpu_end - num_blocks
        num_kept = max(0, min(run.num_gpu, run.cpu_end) - cpu_end)
        on_gpu_alone = run.num_gpu == run.num_blocks
        self._free_tail(run, Tier.CPU, cpu_end - run.cpu_start)
        if not on_gpu_alone:
            self._truncate(run, max(run.num_gpu, cpu_end))
        return num_kept

    def _truncate(self, run: Run, num_blocks: int) -> None:
        """End an unprotected run after `num_blocks` blocks and drop everything beneath it."""
        if num_blocks == run.num_blocks:
            return
        for child in list(run.children.values()):
            self._remove_subtree(child)
        self._free_tail(run, Tier.GPU, min(run.num_gpu, num_blocks))
        self._drop_copies(run, num_blocks)
        if not num_blocks:
            self.remove(run)
            return
        del run.tokens[num_blocks * self._block_bytes :]
        del run.hashes[num_blocks * HASH_BYTES :]
        run.num_blocks = num_blocks

    def _remove_subtree(self, run: Run) -> None:
        below = [run]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below):
            self._drop_copies(node, 0)
            self.remove(node)

    def _drop_copies(self, run: Run, num_blocks: int) -> None:
        """Free the CPU blocks behind the first `num_blocks` of a run that is being cut."""
        num_left = max(0, min(run.cpu_end, num_blocks) - run.cpu_start)
        if num_left < len(run.ids[Tier.CPU]):
            self._on_evict(Tier.CPU, 0, len(run.ids[Tier.CPU]) - num_left)
            self._free_tail(run, Tier.CPU, num_left)

    def remove(self, run: Run) -> None:
        """Free what a childless run still has and unlink it."""
        assert run.parent is not None and not run.children and not run.pins
        for tier in Tier:
            self._free_tail(run, tier, 0)
        del run.parent.children[self.key(run)]
        run.parent = None

    def _free_tail(self, run: Run, tier: Tier, num_left: int) -> None:
        gone = run.ids[tier][num_left:]
        if gone:
            self.pools[tier].free(gone, Owner.RUN)
            self.set_ids(run, tier, run.ids[tier][:num_left])

    def begin_epoch(self) -> None:
        """What is in the tree now is of the past: it is never evicted, only removed."""
        self.epoch += 1
        self._queues = self._new_queues()

    def _new_queues(self) -> tuple[LeastRecentlyUsed, LeastRecentlyUsed]:
        return LeastRecentlyUsed(Tier.GPU, self.is_leaf), LeastRecentlyUsed(Tier.CPU, self.is_leaf)
