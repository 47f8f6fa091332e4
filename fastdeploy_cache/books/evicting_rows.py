"""Making room where there are checkpoints: what counts is what is free then, as more goes than is asked for.

A leaf that loses its tail loses the checkpoint there, and with it all full KV that no other checkpoint follows. Under
the lock.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container
from typing import cast

from fastdeploy_cache.books.checkpoint import Checkpoint
from fastdeploy_cache.books.checkpoints import Checkpoints
from fastdeploy_cache.books.evicting import evict_tail
from fastdeploy_cache.books.residency import Residency
from fastdeploy_cache.books.run import CPU, GPU, ID_BYTES, Run, Tier
from fastdeploy_cache.books.taps import Loss


class RowEviction:
    """Eviction of a tree with rows. Callers have checked that there is room: `Residency.num_available`, and
    `UnitPool.num_available`."""

    def __init__(self, residency: Residency, checkpoints: Checkpoints, trim_some: Callable[[], bool]) -> None:
        self._residency, self._checkpoints, self._trim_some = residency, checkpoints, trim_some
        residency.make_room = self.evict_blocks
        self.num_by_row = [0] * len(checkpoints.pools)  # checkpoints that have left the GPU since its units were short

    def evict_blocks(self, tier: Tier, num_blocks: int) -> None:
        """Free `num_blocks` blocks of a tier or more: leaves by policy, and in the CPU tier also images."""
        residency, pool = self._residency, self._residency.pools[tier]
        wanted = pool.num_free + num_blocks
        if residency.graves.open:
            residency.graves.free(tier, num_blocks)
        while pool.num_free < wanted and self._trim_some():
            pass
        while pool.num_free < wanted:
            if tier is GPU or not self._evict_image():
                self._evict_leaf(tier, wanted - pool.num_free)

    def _evict_leaf(self, tier: Tier, num_blocks: int) -> None:
        run, at_most = self._residency.policy.victim(tier, num_blocks)
        above = run.parent
        evict_tail(self._residency, run, tier, at_most)
        self._trim(run if run.parent is not None else above, Loss.CPU if tier else Loss.GPU)

    def num_colder(self, than: Run | Checkpoint, num_blocks: int, spared: Container[Run]) -> int:
        """How many blocks of the CPU tier are colder than this one, counted up to so many, leaf by leaf and image by
        image; less where a leaf would uncover another one."""
        one, is_colder, num_found = cast("Run", than), self._residency.policy.is_colder, 0
        for policy in (self._residency.policy, self._checkpoints.policy):
            with contextlib.closing(policy.coldest(CPU)) as walk:
                for each in walk:
                    if num_found >= num_blocks or not is_colder(each, one) or each in spared:
                        break
                    num_found += _num_loose(each)
        return num_found

    def evict_colder(self, than: Run | Checkpoint, num_blocks: int, spared: Container[Run]) -> bool:
        """Let an image, or up to so many blocks of a leaf, leave the CPU tier, whichever is colder, if that is colder
        than this one and none of the spared; whether anything went."""
        leaf, image, is_colder = (
            self._coldest_copies(),
            self._checkpoints.coldest(CPU),
            self._residency.policy.is_colder,
        )
        one, is_colder = cast("Run", than), self._residency.policy.is_colder
        if leaf is not None and (image is None or not is_colder(cast("Run", image), leaf)):
            if leaf in spared or not is_colder(leaf, one):
                return False
            self._evict_leaf(CPU, num_blocks)
            return True
        return image is not None and is_colder(cast("Run", image), one) and self._evict_image()

    def _coldest_copies(self) -> Run | None:
        walk = self._residency.policy.coldest(CPU)
        leaf = next(walk, None)
        walk.close()
        return leaf

    def _evict_image(self) -> bool:
        """Let the coldest image leave the CPU tier, unless the coldest leaf there is colder."""
        checkpoint, policy = self._checkpoints.coldest(CPU), self._residency.policy
        if checkpoint is None:
            return False
        leaf = self._coldest_copies()
        if leaf is not None and not policy.is_colder(cast("Run", checkpoint), leaf):
            return False
        run: Run = checkpoint.run
        self._checkpoints.leave(checkpoint, CPU, Loss.CPU)
        self._trim(run, Loss.CPU)
        return True

    def evict_units(self, row: int, num_units: int) -> None:
        """Free so many units of a row or more: the coldest checkpoint leaves the GPU, and so on."""
        pool, graves = self._checkpoints.pools[row].pool, self._residency.graves
        wanted = pool.num_free + num_units
        while pool.num_free < wanted and graves.open and not graves.frees_nothing:
            graves.clear(1)
        while pool.num_free < wanted:
            checkpoint = self._checkpoints.coldest(GPU, row)
            assert checkpoint is not None, f"{num_units} units of {pool.name} were promised, and nothing can go"
            run: Run = checkpoint.run
            self.num_by_row[row] += 1
            self._checkpoints.leave(checkpoint, GPU, Loss.UNITS)
            self._trim(run, Loss.UNITS)

    def _trim(self, run: Run | None, why: Loss) -> None:
        trim = self._residency.trim
        assert trim is not None
        if run is not None:
            trim(run, why)


def _num_loose(leaf: Run) -> int:
    """Blocks of the CPU tier that a leaf, or a checkpoint in its place, gives back when it goes."""
    if isinstance(leaf, Checkpoint):
        return len(leaf.pages or b"") // ID_BYTES
    return leaf.num_in(CPU, leaf.num_blocks) - leaf.num_in(CPU, leaf.num_held)
