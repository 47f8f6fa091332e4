"""What resets have left behind, removed in pieces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

from fastdeploy_cache.books.block_pool import BlockPool
from fastdeploy_cache.books.large_dict import LargeDict
from fastdeploy_cache.books.run import Children, Run, Tier

Roots = dict[str, Run] | LargeDict[str, Run]
AT_ONCE = 512  # runs that a reset itself removes: some milliseconds
A_TURN = 64  # that each later turn removes


class Graves:
    """A reset of a large cache would hold the lock for hundreds of milliseconds, so most of what it has forgotten goes
    later: a few runs with each turn, and whatever an allocation needs. Until then it can be had, as what is cached can.

    The children of a run that is being looked through are not below it any more, but here; those that somebody still
    holds are hung below it again when their turn comes. Under the lock.

    Attributes:
        roots: of earlier epochs, that are being looked through or have something left under them.
        open: the runs that are being looked through, with what was below them; parents first. Without a run: the roots
            of an epoch, by namespace.
    """

    def __init__(self, forget: Callable[[Run], None], pools: tuple[BlockPool, BlockPool]) -> None:
        """`forget`: cuts a run back to what is held of it."""
        self._forget, self._pools = forget, pools
        self.roots: list[Run] = []
        self.open: list[tuple[Run, Children] | tuple[None, Roots]] = []

    @property
    def are_empty(self) -> bool:
        """Whether nothing of an earlier epoch is left: else some of it may still be in use."""
        return not self.open and not self.roots

    def add(self, roots: Roots) -> None:
        """Those of an epoch that is over."""
        if roots:
            self.open.append((None, roots))

    def add_forgotten(self, roots: Roots) -> None:
        """That of a namespace that is forgotten: behind all others, since what goes of it is free only later."""
        self.open.insert(0, (None, roots))

    @property
    def frees_nothing(self) -> bool:
        """Whether all that is left to remove has to be wiped before it is free."""
        run, below = self.open[-1]
        first = run if run is not None else next(iter(below.values()), None)
        return first is not None and first.epoch < 0

    def is_open(self, run: Run) -> bool:
        """Whether this one is being looked through: it goes behind what was below it."""
        return any(run is each for each, _ in self.open)

    def clear(self, num_runs: int) -> None:
        """Remove so many runs, or look at them and leave them to those that hold them."""
        while self.open and num_runs > 0:
            run, below = self.open[-1]
            if not below:
                self.open.pop()
                if run is not None:
                    self._end(run)
                continue
            key, child = below.popitem()
            if run is None:
                num_runs -= 1
                if child.children:
                    self.roots.append(child)
                    self._look_through(child)
                continue
            if child.parent is None:  # it has gone with its last holder
                continue
            num_runs -= 1
            if child.num_held:
                run.add_child(cast("bytes", key), child)
            if child.children:
                self._look_through(child)
            else:
                try:
                    self._forget(child)
                except BaseException:  # no memory: it is looked at again
                    below[cast("Any", key)] = child
                    raise

    def _end(self, run: Run) -> None:
        """What nobody holds below it has gone."""
        if run.parent is not None:
            self._forget(run)
        elif not run.children and run in self.roots:  # else it has gone with its last holder, or has something left
            self.roots.remove(run)

    def free(self, tier: Tier, num_blocks: int) -> int:
        """Remove runs until so many more blocks of a tier are free, or nothing is left; returns how many are."""
        pool = self._pools[tier]
        before = pool.num_free
        while self.open and pool.num_free - before < num_blocks and not self.frees_nothing:
            self.clear(1)
        return pool.num_free - before

    def sweep(self) -> None:
        """Forget the roots below which nothing is left."""
        open_roots = {id(run) for run, _ in self.open}
        self.roots = [root for root in self.roots if root.children or id(root) in open_roots]

    def unlinked(self) -> Iterator[Run]:
        """The runs that no other run has below it, and below which others may be: parents first."""
        for run, below in self.open:
            if run is not None and run.parent is not None and run not in run.parent.children.values():
                yield run
            yield from (child for child in below.values() if child.parent is not None)

    def all_roots(self) -> Iterator[Run]:
        """Those of earlier epochs, also where nobody has begun to look through them."""
        yield from self.roots
        for run, below in self.open:
            if run is None:
                yield from below.values()

    def _look_through(self, run: Run) -> None:
        self.open.append((run, run.take_children()))
