"""Checkpoints in the tree: how they come, who keeps them, and which go when a row's units are short. Under the lock."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol, cast

from fastdeploy_cache.books.block_pool import CHECKPOINT, TASK, BlockPool, Owner
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of, deepest_within, put_in, take_out
from fastdeploy_cache.books.leaves.guarded import GuardedPolicy
from fastdeploy_cache.books.run import CPU, GPU, ID_BYTES, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss, Taps
from fastdeploy_cache.books.unit_pool import UnitPool

if TYPE_CHECKING:
    from fastdeploy_cache.transfer_manager.kv.groups import Row

Units = Sequence["array[int]"]  # of each row, ids first to last


class RowSizes:
    """What a checkpoint at a boundary consists of: units by row, and pages of the CPU tier. Immutable but for what it
    remembers."""

    def __init__(self, rows: Sequence[Row], unit_bytes: Sequence[int], page_bytes: int) -> None:
        """`rows`: those behind the full one. `page_bytes`: of a block of the full row."""
        self.rows, self._unit_bytes, self.page_bytes = tuple(rows), tuple(unit_bytes), page_bytes
        self._counts: dict[int, tuple[int, ...]] = {}  # by boundary: there are as many as a path has blocks
        self._parts: dict[int, tuple[slice, ...]] = {}

    def counts(self, boundary: int) -> tuple[int, ...]:
        """Units of each row that are read behind so many blocks."""
        counts = self._counts.get(boundary)
        if counts is None:
            counts = self._counts[boundary] = tuple([boundary - row.first_block(boundary) for row in self.rows])
        return counts

    def parts(self, boundary: int) -> tuple[slice, ...]:
        """Where those of each row lie among all units of a checkpoint there."""
        parts = self._parts.get(boundary)
        if parts is None:
            ends = list(accumulate(self.counts(boundary)))
            parts = self._parts[boundary] = tuple(map(slice, (0, *ends), ends))
        return parts

    def num_pages(self, boundary: int) -> int:
        """Blocks of the CPU tier that the image of a checkpoint there takes."""
        return -(-self.image_bytes(boundary) // self.page_bytes)

    def image_bytes(self, boundary: int) -> int:
        """Bytes of that image, of one rank."""
        sizes = zip(self.counts(boundary), self._unit_bytes, strict=True)
        return sum([count * size for count, size in sizes])


class Checkpoints:
    """The part of a tree that has the rows behind the full one.

    A checkpoint is published, matched, pinned and evicted whole. Its units lie in the pool of each row, and its image
    in pages of the CPU tier; it goes when it is in neither. Who pins one also pins its path, at its boundary or behind
    it: full KV in front of a checkpoint is never gone before the checkpoint is.
    """

    def __init__(self, sizes: RowSizes, pools: Sequence[UnitPool], pages: BlockPool, policy: GuardedPolicy) -> None:
        """`pools`: by row; two rows may have the same. `policy` ranks checkpoints, as another one does runs."""
        self.sizes, self.pools, self.pages, self.policy = sizes, tuple(pools), pages, policy
        self.taps = Taps()
        self._is_shared = len(set(self.pools)) < len(self.pools)
        self.epoch = 0
        self.num_pinned_pages = self.num_made = 0  # the last: of all times
        self._last_use = 0  # of any checkpoint, in the order of uses of runs
        policy.clear(self.is_leaf, _never_split)

    # -- looking

    def unit_ids(self, checkpoint: Checkpoint) -> list[array[int]]:
        """Its units on the GPU, by row; none of any where they are not there."""
        if not checkpoint.units:
            return [array("i") for _ in self.pools]
        ids = array("i", checkpoint.units)
        return [ids[part] for part in self.sizes.parts(checkpoint.boundary)]

    def is_leaf(self, checkpoint: Run, tier: Tier) -> bool:
        """Whether a checkpoint may leave a tier now, and gives something back by that. As a policy asks of a run."""
        one = cast("Checkpoint", checkpoint)
        ids = one.pages if tier else one.units
        return bool(ids) and not one.num_pins and one.run is not None and one.run.epoch == self.epoch

    def coldest(self, tier: Tier, row: int | None = None) -> Checkpoint | None:
        """The checkpoint that leaves a tier next, of those that have units of a row; None where there is none."""
        with contextlib.closing(self.policy.coldest(tier)) as walk:
            for run in walk:
                checkpoint = cast("Checkpoint", run)
                if row is None or self.sizes.counts(checkpoint.boundary)[row]:
                    return checkpoint
        return None

    def lacking(self, counts: Sequence[int], coming: Sequence[int] | None = None) -> tuple[int, int] | None:
        """The first row that has not so many units for each row, also with those that are `coming`, and how many it
        lacks; None: all have. Rows that have one pool take from each other."""
        wanted: dict[UnitPool, int] = {}
        for number, (pool, count) in enumerate(zip(self.pools, counts, strict=False)):
            num_there, num_wanted = pool.num_available, count
            if self._is_shared:
                num_wanted = wanted[pool] = wanted.get(pool, 0) + count
            if coming is not None:
                num_there += sum([num for other, num in zip(self.pools, coming, strict=True) if other is pool])
            if num_wanted > num_there:
                return number, num_wanted - num_there
        return None

    # -- coming

    def publish(self, run: Run, end: int, boundary: int, units: Units, giver: Owner) -> tuple[Checkpoint, bool]:
        """A checkpoint behind the first `end` blocks of a run, `boundary` blocks from the root, from units that are
        `giver`'s or that another checkpoint holds already.

        Returns the checkpoint that is there, and whether these units are its own now: then it is pinned once for the
        caller. Where it had some already, they stay as they were. All of it or, on `MemoryError`, nothing; on
        `AssertionError`, too: of a place off its run, and of units of another boundary, given twice, or of another
        owner.
        """
        assert run.epoch == self.epoch and 0 < end <= run.num_blocks, "a checkpoint off its run"
        assert tuple(map(len, units)) == self.sizes.counts(boundary), "units of another boundary"
        there = deepest_within(run, end)
        if there is None or there.end != end:
            # As of the last use: by its run's, which nobody has used yet, it would be the first to go, before its
            # request has ended.
            checkpoint = Checkpoint(run, end, boundary, inserted=self.num_made + 1, last_used=self._last_use)
            checkpoint.num_pins = 1  # at once: ranked among those that may go, it would be taken out again
            self._take_units(checkpoint, units, giver)
            put_in(run, checkpoint)
            self.num_made += 1
        elif there.units is not None:
            return there, False
        else:
            checkpoint = there
            self._take_units(checkpoint, units, giver)
            self.pin(checkpoint)
        self.came(checkpoint, GPU)
        return checkpoint, True

    def land_units(self, checkpoint: Checkpoint, units: Units) -> bool:
        """Units of a task's have its KV. Whether they are its own now: else they are the task's still."""
        if not self.is_here(checkpoint) or checkpoint.units is not None:
            return False
        self._take_units(checkpoint, units, TASK)
        self.came(checkpoint, GPU)
        return True

    def land_pages(self, checkpoint: Checkpoint, pages: array[int]) -> bool:
        """The same of pages of the CPU tier."""
        if not self.is_here(checkpoint) or checkpoint.pages is not None:
            return False
        assert len(pages) == self.sizes.num_pages(checkpoint.boundary), "an image of another size"
        packed = pages.tobytes()
        self.pages.hand_over(pages, TASK, CHECKPOINT)
        checkpoint.pages = packed
        if checkpoint.num_pins:
            self.num_pinned_pages += len(pages)
        self.came(checkpoint, CPU)
        if not pages and checkpoint.units is None:  # of chunks, where they end: there is nothing to load
            checkpoint.units = b""
            self.came(checkpoint, GPU)
        return True

    def restore(self, run: Run, end: int, boundary: int, pages: array[int]) -> Checkpoint | None:
        """A checkpoint at this place has its image in these pages of a task's, which storage had. It is pinned once for
        the caller; None where it has an image already, and these are the task's still. On `MemoryError` they are, too.
        """
        assert run.epoch == self.epoch and 0 < end <= run.num_blocks, "a checkpoint off its run"
        there = deepest_within(run, end)
        if there is None or there.end != end:
            checkpoint = Checkpoint(run, end, boundary, inserted=self.num_made, last_used=self._last_use)
            checkpoint.num_pins = 1
            put_in(run, checkpoint)
            try:
                self.land_pages(checkpoint, pages)
            except BaseException:
                take_out(run, checkpoint)
                raise
            return checkpoint
        if there.pages is not None:
            return None
        self.pin(there)
        try:
            self.land_pages(there, pages)
        except BaseException:
            self.unpin(there)
            raise
        return there

    def is_here(self, checkpoint: Checkpoint) -> bool:
        """Whether it hangs in the tree, and is of no older epoch."""
        return checkpoint.run is not None and checkpoint.run.epoch == self.epoch

    def _take_units(self, checkpoint: Checkpoint, units: Units, giver: Owner) -> None:
        packed, num_taken = b"".join([ids.tobytes() for ids in units]), 0
        self.sizes.parts(checkpoint.boundary)  # from now on they are known: who pins it asks for no memory
        try:
            for pool, ids in zip(self.pools, units, strict=True):
                pool.take(ids, giver)
                num_taken += 1
        except BaseException:
            for pool, ids in zip(self.pools[:num_taken], units, strict=False):
                pool.hand_back(ids, giver)
            raise
        checkpoint.units = packed
        if checkpoint.num_pins:
            self._pin_units(checkpoint)

    def came(self, checkpoint: Checkpoint, tier: Tier) -> None:
        """It is in a tier from now on: whoever listens hears of it, and it may be evicted from there."""
        for came in self.taps.anchored:
            came(checkpoint, tier)
        self._offer(checkpoint, tier)

    def use(self, checkpoint: Checkpoint, *, is_first: bool = True, is_left: bool = False) -> None:
        """A request that was served by it, or has made it, has ended: it was used as its run was just now. Not
        `is_first`: that request has been counted. `is_left`: it is to go first, as if nobody had ever used it."""
        run: Run = checkpoint.run
        checkpoint.num_uses += is_first
        checkpoint.last_used, checkpoint.notes = 0 if is_left else run.last_used, run.notes.with_sample(None)
        self._last_use = max(self._last_use, run.last_used)
        if not checkpoint.num_pins:  # else it is ranked when it is let go
            self._offer_all(checkpoint)

    def _offer_all(self, checkpoint: Checkpoint) -> None:
        if checkpoint.units:
            self._offer(checkpoint, GPU)
        if checkpoint.pages:
            self._offer(checkpoint, CPU)

    def _offer(self, checkpoint: Checkpoint, tier: Tier) -> None:
        if not checkpoint.num_pins and self.is_leaf(cast("Run", checkpoint), tier):
            self.policy.push(cast("Run", checkpoint), tier)

    # -- who keeps it

    def pin(self, checkpoint: Checkpoint) -> None:
        """Keep it in the tiers where it is. Its path is pinned, too, by the same holder and as long."""
        assert checkpoint.run is not None and checkpoint.run.num_held >= checkpoint.end, "a pin without its path"
        checkpoint.num_pins += 1
        if checkpoint.num_pins == 1:
            self.num_pinned_pages += len(checkpoint.pages or b"") // ID_BYTES
            self._pin_units(checkpoint)

    def _pin_units(self, checkpoint: Checkpoint) -> None:
        for pool, ids in self._views(checkpoint):
            pool.pin(ids)

    def _views(self, checkpoint: Checkpoint) -> Iterator[tuple[UnitPool, memoryview[int]]]:
        """Its units on the GPU, by row, without a list of them: who pins or lets go has to do so."""
        if checkpoint.units:
            ids = memoryview(checkpoint.units).cast("i")
            for pool, part in zip(self.pools, self.sizes.parts(checkpoint.boundary), strict=True):
                yield pool, ids[part]

    def unpin(self, checkpoint: Checkpoint) -> None:
        """The reverse. Where it is of an earlier epoch it goes with its last holder."""
        assert checkpoint.num_pins > 0, "a checkpoint is unpinned that nobody pins"
        checkpoint.num_pins -= 1
        if checkpoint.num_pins:
            return
        self.num_pinned_pages -= len(checkpoint.pages or b"") // ID_BYTES
        for pool, ids in self._views(checkpoint):
            pool.unpin(ids)
        if not self.is_here(checkpoint):
            self.drop(checkpoint, Loss.RESET)
            return
        self._offer_all(checkpoint)

    # -- going

    def leave(self, checkpoint: Checkpoint, tier: Tier, why: Loss) -> None:
        """Take it from a tier, where nobody pins it. From the last one it goes for good: then the leaf that it was the
        end of is the caller's to trim."""
        assert not checkpoint.num_pins, "a checkpoint leaves that somebody pins"
        if tier:
            self._free_pages(checkpoint, why)
        else:
            for pool, ids in self._views(checkpoint):
                pool.let_go(ids)
            was_there, checkpoint.units = checkpoint.units is not None, None
            self._left(checkpoint, GPU, why, was_there=was_there)
        if checkpoint.units is None and checkpoint.pages is None and checkpoint.run is not None:
            take_out(checkpoint.run, checkpoint)

    def _free_pages(self, checkpoint: Checkpoint, why: Loss) -> None:
        packed, checkpoint.pages = checkpoint.pages, None
        if packed:
            with memoryview(packed) as view, view.cast("i") as ids:
                self.pages.free(ids, CHECKPOINT)
        self._left(checkpoint, CPU, why, was_there=packed is not None)

    def _left(self, checkpoint: Checkpoint, tier: Tier, why: Loss, *, was_there: bool) -> None:
        if (checkpoint.queued_cpu if tier else checkpoint.queued_gpu) is not None and self.is_here(checkpoint):
            self.policy.pull(cast("Run", checkpoint), tier)
        for lifted in self.taps.lifted if was_there else ():
            lifted(checkpoint, tier, why)

    def drop(self, checkpoint: Checkpoint, why: Loss) -> None:
        """Take it from all tiers."""
        for tier in TIERS:
            if checkpoint.run is not None:
                self.leave(checkpoint, tier, why)

    def drop_behind(self, run: Run, num_blocks: int, why: Loss) -> None:
        """A run is about to end after so many blocks: what lies behind goes. Nobody pins any of it."""
        while (checkpoint := run.checkpoint) is not None and checkpoint.end > num_blocks:
            self.drop(checkpoint, why)

    def ids_of(self, runs: Iterable[Run]) -> list[tuple[BlockPool, array[int]]]:
        """What the checkpoints of these have in each pool: units, and pages."""
        found: dict[BlockPool, set[int]] = {pool: set() for pool in (*[each.pool for each in self.pools], self.pages)}
        for checkpoint in (each for run in runs for each in chain_of(run)):
            for units, ids in self._views(checkpoint):
                found[units.pool].update(ids)  # neighbours share units
            found[self.pages].update(array("i", checkpoint.pages or b""))
        return [(pool, array("i", ids)) for pool, ids in found.items()]

    def drop_unpinned(self, run: Run, why: Loss) -> None:
        """A run is of an earlier epoch: what nobody pins of it goes, as nobody finds it any more."""
        for checkpoint in chain_of(run):
            if not checkpoint.num_pins:
                self.drop(checkpoint, why)

    def pass_images_on(self, heirs: Sequence[tuple[Checkpoint, Checkpoint]]) -> None:
        """The second of each pair has the image of the first from now on, which may be pinned. Needs no memory."""
        for checkpoint, heir in heirs:
            self._unpin_pages(checkpoint)
            heir.pages, checkpoint.pages = checkpoint.pages, None
            self._left(checkpoint, CPU, Loss.MOVED, was_there=True)
            if checkpoint.units is None and not checkpoint.num_pins:
                take_out(checkpoint.run, checkpoint)

    def lose_images(self, tree: Chains) -> None:
        """The CPU tier has no memory any more. What is nowhere then goes; the leaves that end there are the caller's to
        trim."""
        for checkpoint in all_checkpoints(tree):
            if checkpoint.pages is None:
                continue
            self._unpin_pages(checkpoint)
            self._free_pages(checkpoint, Loss.RANK)
            if checkpoint.units is None and not checkpoint.num_pins:  # else a load keeps it that could not land
                take_out(checkpoint.run, checkpoint)

    def _unpin_pages(self, checkpoint: Checkpoint) -> None:
        if checkpoint.num_pins:
            self.num_pinned_pages -= len(checkpoint.pages or b"") // ID_BYTES

    def begin_epoch(self) -> None:
        """What is in the tree now is of the past: it is never evicted, only dropped."""
        self.epoch += 1
        self.policy.clear(self.is_leaf, _never_split)


class Chains(Protocol):
    """Where checkpoints hang."""

    def runs(self) -> Iterator[Run]: ...


def all_checkpoints(tree: Chains) -> Iterator[Checkpoint]:
    """Every checkpoint of every run."""
    for run in tree.runs():
        yield from chain_of(run)


def _never_split(run: Run, num_blocks: int) -> Run:
    raise AssertionError(f"{run!r} is a checkpoint, which is not cut at {num_blocks}")
