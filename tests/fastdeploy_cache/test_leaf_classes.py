"""Among leaves in classes the one with the lowest score is found, and by `lru` exactly that."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache.books.leaves.leaf_order import LeafOrder
from fastdeploy_cache.books.run import GPU, Run, Tier
from fastdeploy_cache.books.run_notes import PolicyNotes
from fastdeploy_cache.policies.leaf_classes import LeafClasses, rank_of


class _Leaves:
    """Leaves with classes, of which some go and some are used again."""

    def __init__(self, is_lru: bool, seed: int) -> None:
        self.random = random.Random(seed)
        self.is_lru = is_lru
        self.alive: set[Run] = set()
        self.order = LeafOrder(GPU, rank_of, self.is_leaf, [])
        self.classes = LeafClasses(self.order, self.score)
        self.classes.rescore(is_lru=is_lru)
        self.num_uses = 0

    def is_leaf(self, run: Run, tier: Tier) -> bool:
        return run in self.alive

    def score(self, run: Run) -> tuple[float, int]:
        return (0.0 if self.is_lru else 1.0 + run.notes.reuse_class % 5, run.last_used)

    def use(self, run: Run) -> None:
        self.num_uses += 1
        run.last_used, run.notes = self.num_uses, PolicyNotes(reuse_class=self.random.randrange(12))
        self.alive.add(run)
        self.order.push(run)
        self.classes.push(run)
        self.classes.age(self.num_uses)

    def remove(self, run: Run) -> None:
        self.alive.discard(run)
        if self.random.random() < 0.5:
            self.order.pull(run)  # else it is found out


@pytest.mark.parametrize("num_leaves", [3, 60, 400])
@pytest.mark.parametrize("is_lru", [True, False], ids=["lru", "scores"])
def test_the_lowest_is_found(num_leaves: int, is_lru: bool) -> None:
    """Where ages do not change a score, the first leaf of a class is its lowest: then it is the lowest of all."""
    leaves = _Leaves(is_lru, num_leaves)
    runs = [Run(None, 0) for _ in range(num_leaves)]
    for run in runs:
        leaves.use(run)
    for _ in range(2000):
        lowest = leaves.classes.lowest()
        assert lowest in leaves.alive
        assert leaves.score(lowest) == min(leaves.score(run) for run in leaves.alive)
        leaves.remove(lowest if leaves.random.random() < 0.6 else leaves.random.choice(runs))
        for _ in range(leaves.random.randrange(1, 3)):
            leaves.use(leaves.random.choice(runs))


def test_all_are_walked_by_last_use() -> None:
    """Copying ahead under `lru` sees every leaf once, the one that was used longest ago first."""
    leaves = _Leaves(is_lru=True, seed=1)
    runs = [Run(None, 0) for _ in range(300)]
    for run in runs * 2:
        leaves.use(run)
    walked = list(leaves.classes.by_last_use())
    assert walked == sorted(runs, key=lambda run: run.last_used)
    some = leaves.classes.some(48)
    assert len(some) == 48 and len({run.notes.reuse_class for run in some}) == 12


def test_the_youngest_may_have_the_lowest_score() -> None:
    """Where scores fall and rise with the age, leaves of all ages are looked at, not only the oldest."""
    leaves = _Leaves(is_lru=False, seed=2)
    ages = {run: number for number, run in enumerate(Run(None, 0) for _ in range(600))}
    leaves.classes._score = lambda run: (float(abs(ages[run] - 300)), run.last_used)
    for run in ages:
        leaves.num_uses += 1
        run.last_used = leaves.num_uses
        leaves.alive.add(run)
        leaves.order.push(run)
    leaves.classes.push(next(iter(ages)))
    leaves.classes.age(leaves.num_uses)
    leaves.classes.rescore(is_lru=False)
    assert abs(ages[leaves.classes.lowest()] - 300) <= 50, "one of six points in 600 lies so near"


def test_leaves_that_were_used_behind_the_last_counted_use_are_found() -> None:
    """A touch raises a rank before anybody has counted it: the leaf of that rank is scored all the same."""
    leaves = _Leaves(is_lru=False, seed=3)
    runs = [Run(None, 0, last_used=1000 + number) for number in range(100)]
    leaves.alive.update(runs)
    for run in runs:
        leaves.order.push(run)
        leaves.classes.push(run)
    leaves.classes.rescore(is_lru=False)
    assert leaves.classes.lowest() is runs[0]
