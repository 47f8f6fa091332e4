"""What is in every tier, told from taps alone."""

from __future__ import annotations

from collections import defaultdict

from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.run import CPU, GPU, TIERS, Run, Tier
from fastdeploy_cache.books.taps import Loss


class TapMirror:
    """The blocks of each run in each tier, as taps tell them; `check` compares them with the tree."""

    def __init__(self, tree: PrefixTree) -> None:
        self._tree = tree
        self._there: dict[Run, tuple[set[int], set[int]]] = defaultdict(lambda: (set(), set()))  # by Tier
        self.num_left = dict.fromkeys(Loss, 0)  # by why
        self.num_shaped = [0, 0]  # cut, joined
        taps = tree.residency.taps
        taps.came += (self._came,)
        taps.left += (self._left,)
        taps.left_whole += (self._left,)
        taps.ended += (self._ended,)
        taps.parted += (self._parted,)
        taps.joined += (self._joined,)

    def _came(self, run: Run, tier: Tier, first: int, num_blocks: int) -> None:
        there = self._there[run][tier]
        assert there.isdisjoint(range(first, first + num_blocks)), "blocks came that were there"
        there.update(range(first, first + num_blocks))

    def _left(self, run: Run, tier: Tier, first: int, num_blocks: int, why: Loss) -> None:
        there = self._there[run][tier]
        assert there.issuperset(range(first, first + num_blocks)), "blocks left that were not there"
        assert run.tokens, "what has left cannot be named any more"
        there.difference_update(range(first, first + num_blocks))
        self.num_left[why] += num_blocks

    def _ended(self, run: Run, first: int, why: Loss) -> None:
        assert 0 <= first < run.num_blocks and why is not Loss.OUTPUT and run.tokens

    def _parted(self, upper: Run, lower: Run) -> None:
        self.num_shaped[0] += 1
        cut = upper.num_blocks
        for tier in TIERS:
            there = self._there[lower][tier]
            self._there[upper][tier].update(block for block in there if block < cut)
            moved = {block - cut for block in there if block >= cut}
            there.clear()
            there.update(moved)

    def _joined(self, upper: Run, lower: Run) -> None:
        self.num_shaped[1] += 1
        num_above = upper.num_blocks - lower.num_blocks
        for tier, there in zip(TIERS, self._there.pop(lower), strict=True):
            self._there[upper][tier].update(block + num_above for block in there)

    def check(self) -> None:
        """Raise `AssertionError` where the tree has anything else."""
        told = {run: there for run, there in self._there.items() if any(there)}
        runs = list(self._tree.runs())
        for run in runs:
            gpu, cpu = told.pop(run, (set[int](), set[int]()))
            assert gpu == set(range(run.num_in(GPU, run.num_blocks))), "the GPU has other blocks than taps told"
            assert cpu == set(range(run.cpu_start, run.cpu_start + run.num_in(CPU, run.num_blocks))), "or the CPU tier"
        assert not told, f"taps told of runs that are in no tree: {told}"
