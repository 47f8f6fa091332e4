"""The books of rows: their checkpoints, what is trimmed behind them, and how room is made. Under the lock."""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterator, Sequence
from itertools import islice
from typing import cast

from fastdeploy_cache.books.block_pool import TASK, Owner
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of, deepest_within
from fastdeploy_cache.books.checkpoint_counts import CheckpointCounts
from fastdeploy_cache.books.checkpoints import Checkpoints, RowSizes, Units, all_checkpoints
from fastdeploy_cache.books.evicting_rows import RowEviction
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.path import PromptImages, usable_end
from fastdeploy_cache.books.pinned_prefix import PinnedPrefix
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import ID_BYTES, Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.trimming import Trimmer
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.ipc.clock import Clock

_MOST_LOOKED = 64


class RowBooks:
    """What a tree with rows has beside a tree without."""

    def __init__(
        self, tree: PrefixTree, sizes: RowSizes, pools: Sequence[UnitPool], policy: LeastRecentlyUsed, clock: Clock
    ) -> None:
        """`pools`: by row. `policy` ranks checkpoints: of the kind by which runs are ranked, and nobody else's."""

        def every() -> Iterator[Run]:
            return cast("Iterator[Run]", all_checkpoints(tree))

        ranking = GuardedPolicy(policy, tree.mishaps, every, clock, kind=Checkpoint)
        self.checkpoints = tree.residency.checkpoints = Checkpoints(sizes, pools, tree.pools[1], ranking)
        self.counts = CheckpointCounts()
        self.checkpoints.taps.anchored += (self.counts.anchored,)
        self.checkpoints.taps.lifted += (self.counts.lifted,)
        self._mishaps = tree.mishaps
        self.trimmer = Trimmer(tree.residency)
        self._eviction = RowEviction(tree.residency, self.checkpoints, self.trimmer.go_on)

    @property
    def is_behind(self) -> bool:
        """Whether there is dead KV that waits to be removed."""
        return bool(self.trimmer.waiting)

    def take(self, row: int, num_units: int, owner: Owner) -> array[int]:
        """So many units of a row for an owner, after what is coldest has left the GPU for them. The caller has checked
        `UnitPool.num_available`."""
        pool = self.checkpoints.pools[row].pool
        if num_units > pool.num_free:
            self._eviction.evict_units(row, num_units - pool.num_free)
        return pool.allocate(num_units, owner)

    def make_room_below(self, than: Run | Checkpoint, num_blocks: int, spared: Container[Run] = ()) -> bool:
        """Free so many blocks of the CPU tier by what is worth less there than a copy of this one, but for the spared;
        whether there are as many now. Nothing goes where that is not enough: or what went in vain would be copied down
        into its place, go again, and so on for ever."""
        pool = self.checkpoints.pages
        num_short = num_blocks - pool.num_free
        if num_short > 0 and self._eviction.num_colder(than, num_short, spared) < num_short:
            return False
        while pool.num_free < num_blocks:
            if not self._eviction.evict_colder(than, num_blocks - pool.num_free, spared):
                return False
        return True

    @property
    def shortest_row(self) -> str:
        """The row for whose units the most checkpoints have left the GPU."""
        counts = self._eviction.num_by_row
        return str(self.checkpoints.sizes.rows[counts.index(max(counts))])

    def follow_with(self, policy: LeastRecentlyUsed) -> None:
        """Rank checkpoints by another policy from now on, as `GuardedPolicy.follow_with` does with runs."""
        self.checkpoints.policy.follow_with(policy)

    def use(self, used: Sequence[Checkpoint], *, is_first: bool) -> None:
        """A request was served by the first of these, of one path, and has made the others; the path was used just now.
        `is_first`: it is counted.

        What it has left behind goes before all others: it went straight on from there, to a deeper one, at which the
        next turn will begin. Where prompts part it will not."""
        deepest = max([each.boundary for each in used], default=0)
        for checkpoint in used:
            run = checkpoint.run
            is_fork = checkpoint.end == run.num_blocks and len(run.children) > 1
            is_left = checkpoint.boundary < deepest and not is_fork
            self.checkpoints.use(checkpoint, is_first=is_first, is_left=is_left)

    def limit_path(self, checkpoint: Checkpoint, at_most: int) -> None:
        """Keep so many checkpoints in front of this one, besides those where prompts part: of more, those that were
        made first go, of those that nobody pins."""
        while (spare := self._spare(checkpoint, at_most)) is not None:
            self.checkpoints.drop(spare, Loss.SPARE)

    @staticmethod
    def _spare(checkpoint: Checkpoint, at_most: int) -> Checkpoint | None:
        inner, run, each = list[Checkpoint](), checkpoint.run, checkpoint.above
        while run.parent is not None:
            while each is not None:
                if each.end < run.num_blocks or len(run.children) < 2:
                    inner.append(each)
                each = each.above
            run = run.parent
            each = run.checkpoint
        spare = [each for each in inner if not each.num_pins] if len(inner) > at_most else None
        return min(spare, key=_order_of_making) if spare else None

    def end_units(self, checkpoint: Checkpoint, units: Units, succeeded: bool, *, stays: bool = False) -> bool:
        """A task that was to fill these units has ended: they are the checkpoint's, or they go home; which of both.
        Where it `stays` they are the task's still instead of going home. Without memory they have come in vain."""
        try:
            if succeeded and self.checkpoints.land_units(checkpoint, units):
                return True
        except MemoryError:
            self._mishaps.note("landing")
        if not stays:
            self.free_units(units)
        return False

    def free_units(self, units: Units) -> None:
        """What a task had of each row goes home. Needs no memory."""
        for pool, ids in zip(self.checkpoints.pools, units, strict=False):
            pool.pool.free_each(ids, TASK)

    def end_pages(self, checkpoint: Checkpoint, pages: array[int], succeeded: bool) -> bool:
        """The same of pages of the CPU tier."""
        try:
            if succeeded and self.checkpoints.land_pages(checkpoint, pages):
                return True
        except MemoryError:
            self._mishaps.note("landing")
        self.checkpoints.pages.free_each(pages, TASK)
        return False

    def keep(self, pinned: PinnedPrefix) -> None:
        """Pin the deepest checkpoint within a prefix that is pinned."""
        assert pinned.checkpoint is None and pinned.pin is not None
        checkpoint = self.deepest_within(pinned.pin.run.path(), pinned.num_blocks)
        if checkpoint is not None:
            self.checkpoints.pin(checkpoint)
            pinned.checkpoint = checkpoint

    @staticmethod
    def deepest_within(path: Sequence[Run], num_blocks: int) -> Checkpoint | None:
        """The deepest checkpoint within the first blocks of a path."""
        depth = sum([run.num_blocks for run in path])
        for run in reversed(path):
            depth -= run.num_blocks
            checkpoint = deepest_within(run, num_blocks - depth)
            if checkpoint is not None:
                return checkpoint
        return None

    @staticmethod
    def next_behind(run: Run, num_blocks: int) -> int | None:
        """The boundary of a checkpoint behind the first blocks of a path that ends in this run: the first in it, or one
        of the nearest in those that go on from it. At most so many runs are looked at that it takes no time."""
        level = [run]
        for _ in range(_MOST_LOOKED):
            found = [each.boundary for below in level for each in chain_of(below) if each.boundary > num_blocks]
            level = [child for below in level for child in islice(below.children.values(), _MOST_LOOKED)][:_MOST_LOOKED]
            if found or not level:
                return min(found, default=None)
        return None

    def end_keeping(self, pinned: PinnedPrefix) -> None:
        """The reverse."""
        checkpoint, pinned.checkpoint = pinned.checkpoint, None
        if checkpoint is not None:
            self.checkpoints.unpin(checkpoint)


def _order_of_making(checkpoint: Checkpoint) -> int:
    return checkpoint.inserted


def usable_checkpoints(
    path: Sequence[Run], num_blocks: int, prompt: PromptImages, block_size: int
) -> tuple[Checkpoint | None, Checkpoint | None]:
    """The deepest checkpoint within the first blocks of a path, and the deepest that is on the GPU with its full KV.

    One that lies inside an image, where another request has wanted it, is passed over by who does not want that.
    """
    depth, on_gpu, deepest = sum([run.num_blocks for run in path]), -1, None
    for run in reversed(path):
        depth -= run.num_blocks
        checkpoint = deepest_within(run, num_blocks - depth) if run.checkpoint is not None else None
        while checkpoint is not None:
            boundary = checkpoint.boundary
            is_nowhere = checkpoint.units is None and checkpoint.pages is None  # a load keeps it that could not land
            if is_nowhere:
                checkpoint = checkpoint.above
                continue
            if not prompt.images or usable_end(prompt, boundary, block_size) == boundary:
                deepest = deepest or checkpoint
                if on_gpu < 0:
                    on_gpu = sum([len(each.gpu) for each in path]) // ID_BYTES
                if checkpoint.units is not None and boundary <= on_gpu:
                    return deepest, checkpoint
            checkpoint = checkpoint.above
    return deepest, None
