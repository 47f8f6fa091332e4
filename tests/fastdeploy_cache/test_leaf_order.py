"""The order of leaves: exact whatever happens to them, and nothing of it is ever gone through at once."""

from __future__ import annotations

import random

import pytest

from fastdeploy_cache.books.leaves.leaf_order import PIECE, LeafOrder
from fastdeploy_cache.books.run import GPU, Run, Tier


class Leaves:
    """An order, and beside it the plain list that it must be equal to."""

    def __init__(self) -> None:
        self.gone: set[int] = set()
        self.order = LeafOrder(GPU, lambda run: run.last_used, self.is_leaf, [])
        self.known: list[Run] = []  # as they came

    def is_leaf(self, run: Run, tier: Tier) -> bool:
        """Whatever has not gone; there is one tier here."""
        return tier is GPU and id(run) not in self.gone

    def push(self, run: Run) -> None:
        """Equal ones stand as they came, and one whose rank is as before keeps its place."""
        if run.queued_gpu != run.last_used:
            self.known = [each for each in self.known if each is not run]
            self.known.append(run)
        self.order.push(run)

    def expected(self) -> list[Run]:
        """What a stable sort says."""
        return sorted([run for run in self.known if id(run) not in self.gone], key=lambda run: int(run.last_used))


def new_run(last_used: int) -> Run:
    """A run of that rank."""
    return Run(None, 0, last_used=last_used)


@pytest.mark.parametrize("spread", [1, 100_000])
def test_leaves_come_in_the_order_of_their_ranks(spread: int) -> None:
    """Pushed in any order, moved, pulled and gone: the same as a sorted list, with many equal ranks and with few."""
    choose, leaves = random.Random(spread), Leaves()
    for step in range(6 * PIECE):
        if leaves.known and choose.random() < 0.4:
            run = choose.choice(leaves.known)
            what = choose.randrange(3)
            if what == 0:
                run.last_used = choose.randrange(spread)
                leaves.push(run)
            elif what == 1:
                leaves.known.remove(run)
                leaves.gone.add(id(run))
                leaves.order.pull(run)
            elif leaves.order.first() is run:
                leaves.gone.add(id(run))
        else:
            leaves.push(new_run(choose.randrange(spread) if choose.random() < 0.5 else step))
        if step % 200 == 0:
            assert list(leaves.order.walk()) == leaves.expected()
    for expected in leaves.expected():
        assert leaves.order.first() is expected
        leaves.gone.add(id(expected))


def test_a_rank_that_nobody_has_told_of_is_put_right() -> None:
    """A leaf whose rank has risen unseen comes at its new place, for who takes the first and for who only looks."""
    leaves = Leaves()
    first, second, third = (new_run(rank) for rank in (1, 2, 3))
    for run in (first, second, third):
        leaves.push(run)
    first.last_used = 3
    assert list(leaves.order.walk()) == [second, third, first]
    assert leaves.order.first() is second
    leaves.gone.add(id(second))
    assert leaves.order.first() is third


def test_no_step_goes_through_many_leaves() -> None:
    """Whether all of them are pushed once more, or pulled, or an order is over: each step looks at a few ranks."""
    num_leaves, num_looks = 40 * PIECE, 0

    def is_leaf(run: Run, tier: Tier) -> bool:
        nonlocal num_looks
        num_looks += 1
        return True

    order = LeafOrder(GPU, lambda run: run.last_used, is_leaf, [])
    runs = [new_run(number) for number in range(num_leaves)]
    for run in runs:
        order.push(run)
    for number, run in enumerate(runs[1:], num_leaves):  # all but the first are used again, the first goes
        run.last_used = number
        order.push(run)
    order.pull(runs[0])
    assert order.first() is runs[1]
    assert num_looks == 1
    following = LeafOrder(GPU, lambda run: run.last_used, is_leaf, order.pieces)
    num_left = [sum(len(ranks) for ranks, _ in following.pieces)]
    for number in range(2):
        following.push(new_run(number))
        num_left.append(sum(len(ranks) for ranks, _ in following.pieces))
    assert num_left[0] == num_leaves - 1
    assert 0 < num_left[0] - num_left[1] <= PIECE
    assert 0 < num_left[1] - num_left[2] <= PIECE
