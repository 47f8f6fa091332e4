"""Which blocks of each run are in which tier, which are held there, and which go when room is short."""

from __future__ import annotations

from array import array

from fastdeploy_cache.books.block_hash import HASH_BYTES
from fastdeploy_cache.books.block_pool import RUN, BlockPool
from fastdeploy_cache.books.run import CPU, GPU, TIERS, Run, Tier
from fastdeploy_cache.books.transfer import Segment
from fastdeploy_cache.policies.eviction import EvictionPolicy


class Residency:
    """The ids of all runs, their sums and what is held: the bookkeeping beneath `PrefixTree`.

    Residency is prefix-closed: what is on the GPU has its parent on the GPU, and what is anywhere has its parent in
    some tier. Of a run, the blocks up to its last pin are held: neither they nor their copies are evicted. With a pin
    anywhere beneath it, all of it is held.
    """

    def __init__(self, block_bytes: int, pools: tuple[BlockPool, BlockPool], policy: EvictionPolicy) -> None:
        self.pools = pools  # by Tier
        self.policy = policy
        self.epoch = 0
        self.num_protected = [0, 0]  # held blocks by Tier
        # by Tier: blocks evicted since the start, [those with a copy in the other tier, those without]
        self.num_evicted = ([0, 0], [0, 0])
        self._block_bytes = block_bytes

    def num_available(self, tier: Tier) -> int:
        """Blocks of a tier that are free or can be evicted now."""
        pool = self.pools[tier]
        num_evictable = pool.count(RUN) - self.num_protected[tier]
        if pool.num_read:  # what is being read frees nothing yet; some of it may be held, too
            num_read = pool.num_read if tier else pool.num_read_of(RUN)  # on the GPU most are a caller's own
            num_evictable = max(0, num_evictable - num_read)
        return pool.num_free + num_evictable

    def is_leaf(self, run: Run, tier: Tier) -> bool:
        """Whether the run may lose its tail in that tier: blocks there, not held, none beneath, still in the tree."""
        ids = run.ids[tier]
        return (
            bool(ids)
            and (len(ids) if tier == 0 else run.cpu_start + len(ids)) > run.num_held
            and not run.num_children_in[tier]
            and run.epoch == self.epoch
            and run.parent is not None
        )

    def key(self, run: Run) -> bytes:
        """What its parent finds a run under: its first block's tokens and extra key."""
        tokens = bytes(run.tokens[: self._block_bytes])
        return tokens if run.extras is None else tokens + run.extras.get(0, b"")

    # -- what is where

    def add_ids(self, run: Run, tier: Tier, ids: array[int]) -> None:
        """More blocks at the end of the run's interval in a tier."""
        run.ids[tier].extend(ids)
        self.added_ids(run, tier, len(ids))

    def added_ids(self, run: Run, tier: Tier, num_ids: int, *, is_offered: bool = True) -> None:
        """Count what has been added at the end of the run's interval in a tier. Not `is_offered`: the caller pins it
        now, and it takes part in eviction when it is let go. Offered before its first use, it would have the lowest
        rank of all, and the first eviction would have to put every such entry right."""
        if num_ids == len(run.ids[tier]):
            self.count_child(run, tier, 1)
        end = run.num_gpu if tier is GPU else run.cpu_end
        self.num_protected[tier] += max(0, min(end, run.num_held) - (end - num_ids))
        if is_offered:
            self.offer(run, tier)

    def add_copies_below(self, run: Run, ids: array[int]) -> None:
        """More copies in front of those that the run has."""
        before = run.num_in(CPU, run.num_held)
        run.ids[1][:0] = ids
        run.cpu_start -= len(ids)
        self.num_protected[1] += run.num_in(CPU, run.num_held) - before

    def take_copies(self, run: Run) -> array[int]:
        """All of a run's copies, which are another run's from now on; the books of this one are put right."""
        self.num_protected[1] -= run.num_in(CPU, run.num_held)
        ids, run.ids = run.ids[1], (run.ids[0], array("i"))
        run.cpu_start = 0
        self.count_child(run, CPU, -1)
        return ids

    def drop_spare_copies(self, run: Run) -> None:
        """Free the copies of a run that is on the GPU as far as it was copied, and of which nothing is on its way: also
        of one that is held, since what is held stays readable."""
        is_spare = run.ids[1] and run.cpu_end <= run.num_gpu and run.epoch == self.epoch
        if is_spare and not any(isinstance(pin, Segment) for pin in run.pins):
            ids = self.take_copies(run)
            self.num_evicted[CPU][0] += len(ids)
            self.pools[CPU].free(ids, RUN)

    def _free_tail(self, run: Run, tier: Tier, num_left: int) -> None:
        """Give the run's ids in a tier behind the first `num_left` back; none of them is held."""
        ids = run.ids[tier]
        gone = ids[num_left:]
        if gone:
            del ids[num_left:]
            self.pools[tier].free(gone, RUN)
            if not num_left:
                self.count_child(run, tier, -1)

    def count_child(self, run: Run, tier: Tier, change: int) -> None:
        """`run` began (1) or ceased (-1) to have blocks in a tier."""
        parent = run.parent
        if change and parent is not None:
            parent.num_children_in[tier] += change
            if not parent.num_children_in[tier]:
                self.offer(parent, tier)

    def offer(self, run: Run, tier: Tier) -> None:
        """Let a run take part in a tier's eviction where it is a leaf there."""
        if self.is_leaf(run, tier):
            self.policy.push(run, tier)

    # -- what is held

    def hold(self, run: Run) -> None:
        """Count anew what of a run is held, after its pins or its children's have changed, and so on upwards."""
        while True:
            before, pins = run.num_held, run.pins
            if run.num_held_children:
                held = run.num_blocks
            elif len(pins) == 1:
                held = pins[0].end
            else:
                held = max([pin.end for pin in pins], default=0)
            if held == before:
                return
            num_gpu, parent = len(run.ids[0]), run.parent
            assert parent is not None
            self.num_protected[0] += min(held, num_gpu) - min(before, num_gpu)
            if run.ids[1]:
                self.num_protected[1] += run.num_in(CPU, held) - run.num_in(CPU, before)
            run.num_held = held
            if held < before:
                self._let_go(run)
            if (held and before) or parent.parent is None:
                return
            parent.num_held_children += 1 if held else -1
            run = parent

    def _let_go(self, run: Run) -> None:
        """Less of a run is held: it may be evicted from now on or, where it is of an older epoch, is freed."""
        if run.epoch != self.epoch:
            self.truncate(run, run.num_held)
        else:
            for tier in TIERS:
                self.offer(run, tier)

    # -- eviction

    def evict(self, tier: Tier, num_blocks: int) -> None:
        """Free exactly `num_blocks` of a tier, those that the policy chooses.

        The caller has checked `num_available`: asked for more, it would go on to victims that nobody named, and in the
        end find none.
        """
        while num_blocks > 0:
            run, at_most = self.policy.victim(tier, num_blocks)
            num_blocks -= self.evict_tail(run, tier, at_most)

    def evict_tail(self, run: Run, tier: Tier, at_most: int) -> int:
        """Take up to `at_most` blocks from the end of a leaf of the tier.

        Returns how many of them are free now: blocks that storage is reading are free when it has read them.
        """
        num_free = self.pools[tier].num_free
        if tier == 0:
            taken = len(run.ids[0]) - run.num_held
            if taken > at_most:  # noqa: PLR1730 (min() would be a tenth of a one-block call)
                taken = at_most
            num_kept = self._evict_gpu_tail(run, taken)
        else:
            taken = min(at_most, run.cpu_end - max(run.num_held, run.cpu_start))
            num_kept = self._evict_cpu_tail(run, taken)
        evicted = self.num_evicted[tier]
        evicted[0] += num_kept
        evicted[1] += taken - num_kept
        num_freed = self.pools[tier].num_free - num_free
        return num_freed if num_freed < taken else taken  # noqa: FURB136 (as above)

    def evict_run(self) -> array[int]:
        """Evict of the run that the policy chooses all that is not held on the GPU; returns the ids, first to last."""
        run, _ = self.policy.victim(GPU, self.pools[0].num_blocks)
        ids = run.ids[0][run.num_held :]
        num_kept = self._evict_gpu_tail(run, len(ids))
        self.num_evicted[GPU][0] += num_kept
        self.num_evicted[GPU][1] += len(ids) - num_kept
        return ids

    def _evict_gpu_tail(self, run: Run, num_blocks: int) -> int:
        """Returns of how many blocks a CPU copy remains."""
        ids = run.ids[0]
        before = len(ids)
        num_gpu = before - num_blocks
        end = num_gpu
        if run.ids[1] and run.cpu_start <= num_gpu < run.cpu_end:
            end = run.cpu_end
        if num_gpu:
            gone = ids[num_gpu:]
            del ids[num_gpu:]
            self.pools[0].free(gone, RUN)
        elif end:
            self._free_tail(run, GPU, 0)
        self.truncate(run, end)
        return min(end, before) - num_gpu if end > num_gpu else 0

    def _evict_cpu_tail(self, run: Run, num_blocks: int) -> int:
        """Returns of how many blocks a GPU copy remains."""
        cpu_end = run.cpu_end - num_blocks
        num_kept = max(0, min(run.num_gpu, run.cpu_end) - cpu_end)
        on_gpu_alone = run.num_gpu == run.num_blocks
        self._free_tail(run, CPU, cpu_end - run.cpu_start)
        if not on_gpu_alone:
            self.truncate(run, max(run.num_gpu, cpu_end))
        return num_kept

    def truncate(self, run: Run, num_blocks: int) -> None:
        """End a run after `num_blocks` blocks, of which none behind is held, and drop everything beneath it."""
        if num_blocks == run.num_blocks:
            return
        if run.epoch == self.epoch:
            self.policy.shrink(run, num_blocks)
        if run.children:
            for child in list(run.children.values()):
                self._remove_subtree(child)
        if not num_blocks:
            self._remove(run)
            return
        if len(run.ids[0]) > num_blocks:
            self._free_tail(run, GPU, num_blocks)
        if run.ids[1]:
            self._drop_copies(run, num_blocks)
        del run.tokens[num_blocks * self._block_bytes :]
        del run.hashes[num_blocks * HASH_BYTES :]
        if run.extras is not None:
            run.extras = {block: extra for block, extra in run.extras.items() if block < num_blocks} or None
        run.num_blocks = num_blocks
        run.num_stored, run.num_offered = min(run.num_stored, num_blocks), min(run.num_offered, num_blocks)

    def _remove_subtree(self, run: Run) -> None:
        below = [run]
        for node in below:
            below.extend(node.children.values())
        for node in reversed(below):
            if run.epoch == self.epoch:
                self.policy.shrink(node, 0)
            self._remove(node)

    def _drop_copies(self, run: Run, num_blocks: int) -> None:
        """Free the CPU blocks behind the first `num_blocks` of a run that is being cut."""
        num_left = run.num_in(CPU, num_blocks)
        num_gone = len(run.ids[1]) - num_left
        if num_gone:
            if run.epoch == self.epoch:  # else it is a reset's doing
                self.num_evicted[CPU][1] += num_gone
            self._free_tail(run, CPU, num_left)

    def _remove(self, run: Run) -> None:
        """Free what a childless run still has and unlink it."""
        assert run.parent is not None and not run.children and not run.num_held
        if run.ids[0]:
            self._free_tail(run, GPU, 0)
        self._drop_copies(run, 0)
        del run.parent.children[self.key(run)]
        run.parent = None
        run.tokens, run.hashes = bytearray(), bytearray()  # a policy may hold the run for a while

    def begin_epoch(self) -> None:
        """What is in the tree now is of the past: it is never evicted, only removed."""
        self.epoch += 1
