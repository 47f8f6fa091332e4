"""Pools: lowest ids first, one owner each, all or nothing."""

from __future__ import annotations

from array import array

import pytest

from fastdeploy_cache.books.block_pool import BlockPool, Owner
from fastdeploy_cache.errors import BlockOwnerError


def test_the_lowest_free_ids_are_given_first() -> None:
    """Also when ids come back out of order, so that copies find neighbours."""
    pool = BlockPool("GPU", 8)
    assert pool.allocate(5, Owner.REQUEST).tolist() == [0, 1, 2, 3, 4]
    pool.free(array("i", [3, 0, 4]), Owner.REQUEST)
    assert pool.allocate(4, Owner.TASK).tolist() == [0, 3, 4, 5]
    assert (pool.num_free, pool.count(Owner.REQUEST), pool.count(Owner.TASK)) == (2, 2, 4)
    assert pool.ids_of(Owner.FREE) == [6, 7]


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 4], "GPU block 4 is free, not a request's"),
        ([1, 2], "GPU block 2 is cached, not a request's"),
        ([1, 1], "GPU block 1 is given twice"),
        ([1, 8], "GPU has no block 8; ids are 0 to 7"),
        ([1, -1], "GPU has no block -1"),
    ],
)
def test_a_double_or_foreign_free_is_refused_whole(ids: list[int], words: str) -> None:
    """The error names block and owner; nothing has changed, so the right free still works."""
    pool = BlockPool("GPU", 8)
    pool.allocate(3, Owner.REQUEST)
    pool.hand_over(array("i", [2]), Owner.REQUEST, Owner.RUN)
    with pytest.raises(BlockOwnerError, match=words):
        pool.free(array("i", ids), Owner.REQUEST)
    assert (pool.num_free, pool.count(Owner.REQUEST), pool.count(Owner.RUN)) == (5, 2, 1)
    pool.free(array("i", [0, 1]), Owner.REQUEST)
    assert pool.num_free == 7


@pytest.mark.parametrize("bad", [7, 5000, -1, 300])
def test_many_ids_are_checked_like_few(bad: int) -> None:
    """Doubles, foreign ids and ids outside the pool are found among hundreds, in any order; nothing is changed."""
    pool = BlockPool("GPU", 1000)
    ids = pool.allocate(300, Owner.REQUEST)
    backwards = array("i", reversed(ids))
    with pytest.raises(BlockOwnerError, match=str(bad)):
        pool.free(backwards + array("i", [bad]), Owner.REQUEST)
    assert pool.count(Owner.REQUEST) == 300
    pool.free(backwards, Owner.REQUEST)
    assert pool.allocate(1000, Owner.RUN).tolist() == list(range(1000))
