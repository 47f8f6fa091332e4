"""Checkpoints in the books: what they weigh, what they refuse, and paths of very many runs."""

from __future__ import annotations

import gc
import sys
from array import array

import numpy as np
import pytest

from fastdeploy_cache.books.block_pool import REQUEST, RUN, BlockPool
from fastdeploy_cache.books.books import Books
from fastdeploy_cache.books.checkpoint import Checkpoint, chain_of
from fastdeploy_cache.books.checkpoints import Checkpoints, RowSizes
from fastdeploy_cache.books.growing import insert
from fastdeploy_cache.books.leaves.policy import LeastRecentlyUsed
from fastdeploy_cache.books.prefix_tree import PrefixTree
from fastdeploy_cache.books.row_books import RowBooks
from fastdeploy_cache.books.row_invariants import check_rows
from fastdeploy_cache.books.run import GPU, Pin, Run
from fastdeploy_cache.books.taps import Loss
from fastdeploy_cache.books.trimming import A_TURN
from fastdeploy_cache.books.unit_pool import UnitPool
from fastdeploy_cache.request import Request
from fastdeploy_cache.transfer_manager.kv.groups import Row
from tests.rigs.manual_clock import ManualClock


class Bench:
    """Books of blocks of one token, with a state and a window of three tokens."""

    def __init__(self, num_blocks: int, *, keeps_borders: bool = False) -> None:
        clock = ManualClock()
        pools = (BlockPool("GPU", num_blocks), BlockPool("CPU", 8))
        policy = LeastRecentlyUsed(clock.now, keeps_borders=keeps_borders)
        self.tree = PrefixTree(1, pools, policy, 0, clock)
        self.books = Books(self.tree, clock)
        rows = (Row("state", 0, 1), Row("window", 3, 1))
        self.pools = (UnitPool("GPU state", 8), UnitPool("GPU window 3", 16))
        ranking = LeastRecentlyUsed(clock.now)
        self.rows = self.books.rows = RowBooks(self.tree, RowSizes(rows, (8, 4), 16), self.pools, ranking, clock)

    def cached(self, tokens: list[int], *, step: int | None = None) -> Pin:
        """Cache a prompt, by so many blocks at a time, and pin it."""
        keys, pin = Request(request_id="a", prompt_token_ids=tokens).keys(1), None
        for first in range(0, len(tokens), step or len(tokens)):
            ids = self.books.take(min(step or len(tokens), len(tokens) - first), GPU, REQUEST)
            at = (pin.run, pin.end) if pin is not None else (self.tree.root(""), 0)
            done = insert(self.tree, at, keys, first, ids)
            pin = self.tree.move_pin(pin, done.run, done.end)
        assert pin is not None
        return pin

    def units(self, boundary: int) -> list[array[int]]:
        return [self.rows.take(row, n, REQUEST) for row, n in enumerate(self.rows.checkpoints.sizes.counts(boundary))]

    def publish(self, pin: Pin, boundary: int, units: list[array[int]] | None = None) -> Checkpoint:
        given = self.units(boundary) if units is None else units
        checkpoint, _ = self.rows.checkpoints.publish(pin.run, pin.end, boundary, given, REQUEST)
        self.rows.checkpoints.unpin(checkpoint)
        return checkpoint


def test_what_a_checkpoint_weighs() -> None:
    """At most 450 bytes beside its ids, of which the garbage collector sees none."""
    bench = Bench(8)
    checkpoint = bench.publish(bench.cached([1, 2, 3, 4]), 4)
    assert checkpoint.units is not None and len(checkpoint.units) == 4 * 3
    num_bytes = sys.getsizeof(checkpoint) + sys.getsizeof(checkpoint.units) - len(checkpoint.units)
    assert num_bytes <= 450 and not gc.is_tracked(checkpoint)


def test_neighbours_share_units_of_a_window() -> None:
    """The last of them that goes frees what both held."""
    bench = Bench(8)
    pin = bench.cached([1, 2, 3, 4, 5])
    window = bench.rows.take(1, 3, REQUEST)
    tree, rows, state = bench.tree, bench.rows.checkpoints, bench.rows.take(0, 2, REQUEST)
    first, _ = rows.publish(pin.run, 4, 4, [state[:1], window[:2]], REQUEST)
    second, _ = rows.publish(pin.run, 5, 5, [state[1:], window[1:]], REQUEST)
    assert [bench.pools[1].num_holders(unit) for unit in window] == [1, 2, 1]
    assert bench.pools[1].num_available == 16 - 3  # all of them are pinned for who has published them
    check_rows(tree, bench.rows, [first, second])
    rows.unpin(first)
    assert bench.pools[1].num_available == 16 - 2
    rows.unpin(second)
    check_rows(tree, bench.rows, [])
    rows.drop(first, Loss.RESET)
    assert bench.pools[1].pool.ids_of(RUN) == sorted(window[1:]) and second.above is None
    rows.drop(second, Loss.RESET)
    assert not bench.pools[1].pool.ids_of(RUN) and not bench.pools[0].pool.ids_of(RUN)
    check_rows(tree, bench.rows, [])


@pytest.mark.parametrize("fault", ["twice", "nobody's", "another boundary", "off its run", "an earlier epoch"])
def test_what_is_no_checkpoint(fault: str) -> None:
    """An assertion of the books, and nothing has changed."""
    bench = Bench(8)
    pin = bench.cached([1, 2, 3, 4])
    units = bench.units(4)
    end, boundary = (5 if fault == "off its run" else 4), (1 if fault == "another boundary" else 4)
    if fault == "twice":
        units[1][1] = units[1][0]
    elif fault == "nobody's":
        units[1][1] = 15
    elif fault == "an earlier epoch":
        bench.tree.reset()
    before = [pool.pool.ids_of(REQUEST) for pool in bench.pools]
    with pytest.raises(AssertionError, match=r"twice|not its giver's|another boundary|off its run"):
        bench.rows.checkpoints.publish(pin.run, end, boundary, units, REQUEST)
    assert [pool.pool.ids_of(REQUEST) for pool in bench.pools] == before and not list(chain_of(pin.run))
    check_rows(bench.tree, bench.rows, [])


def test_nothing_cuts_through_a_pinned_checkpoint() -> None:
    """Neither a truncation nor an eviction; a pin without its path is refused, too."""
    bench = Bench(8)
    pin = bench.cached([1, 2, 3, 4])
    checkpoint, rows = bench.publish(pin, 4), bench.rows.checkpoints
    rows.pin(checkpoint)
    with pytest.raises(AssertionError, match="leaves that somebody pins"):
        rows.drop(checkpoint, Loss.RESET)
    assert bench.pools[0].num_available == 8 - 1 and bench.pools[1].num_available == 16 - 2
    bench.tree.unpin(pin)
    with pytest.raises(AssertionError, match="leaves that somebody pins"):
        bench.tree.residency.truncate(checkpoint.run, 3, Loss.GPU)
    rows.unpin(checkpoint)
    with pytest.raises(AssertionError, match="a pin without its path"):
        rows.pin(checkpoint)


def test_a_second_checkpoint_at_a_boundary_leaves_units_to_their_giver() -> None:
    """One that has an image alone takes them as its units on the GPU."""
    bench = Bench(8)
    pin = bench.cached([1, 2, 3, 4])
    checkpoint, rows = bench.publish(pin, 4), bench.rows.checkpoints
    more = bench.units(4)
    assert rows.publish(pin.run, pin.end, 4, more, REQUEST) == (checkpoint, False)
    pages = bench.books.take(rows.sizes.num_pages(4), 1, 3)  # type: ignore[arg-type]
    assert rows.land_pages(checkpoint, pages)
    rows.leave(checkpoint, GPU, Loss.UNITS)
    assert rows.publish(pin.run, pin.end, 4, more, REQUEST) == (checkpoint, True)
    assert rows.unit_ids(checkpoint) == more
    check_rows(bench.tree, bench.rows, [checkpoint])


def runs_of(tree: PrefixTree) -> list[Run]:
    return list(tree.runs())


def test_a_path_of_20_000_runs_is_trimmed_in_turns() -> None:
    """When its only checkpoint goes, a turn removes so many runs and not more, without a call for each inside the
    last; what is needed meanwhile is had, and nothing is left in the end."""
    num_runs = 20_000
    bench = Bench(num_runs + 1, keeps_borders=True)
    pin = bench.cached(np.arange(num_runs, dtype=np.int32).tolist(), step=1)
    bench.publish(pin, num_runs)
    bench.books.let_go(pin)
    assert len(runs_of(bench.tree)) == num_runs
    bench.rows.take(0, 8, REQUEST)  # all states: the one of the checkpoint, too
    left = [len(runs_of(bench.tree))]
    assert left[0] == num_runs - A_TURN and bench.rows.is_behind
    for _ in range(3):
        with bench.books:
            pass
        left.append(len(runs_of(bench.tree)))
    assert left == [num_runs - turn * A_TURN for turn in range(1, 5)]
    check_rows(bench.tree, bench.rows, [])
    assert len(bench.books.take(num_runs - 5, GPU, REQUEST)) == num_runs - 5
    while bench.rows.is_behind:
        with bench.books:
            pass
    assert not runs_of(bench.tree) and bench.books.pools[GPU].count(RUN) == 0


def test_what_gets_no_memory_to_be_trimmed_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The verb that let it go has happened; a later turn removes it, and one that fails, too, leaves it waiting."""
    bench = Bench(8)
    pin = bench.cached([1, 2, 3, 4])
    bench.publish(pin, 4)
    bench.books.let_go(pin)

    def fail(run: Run, num_blocks: int, why: Loss) -> None:
        raise MemoryError

    with monkeypatch.context() as without:
        without.setattr(bench.tree.residency, "truncate", fail)
        bench.rows.take(0, 8, REQUEST)
        assert bench.rows.is_behind
        with pytest.raises(MemoryError):
            bench.rows.trimmer.go_on()
        assert bench.rows.is_behind
        check_rows(bench.tree, bench.rows, [])
    with bench.books:
        pass
    assert not bench.rows.is_behind and not runs_of(bench.tree)
    check_rows(bench.tree, bench.rows, [])


def test_what_rows_lack() -> None:
    """The first row that is short and by how many; rows that have one pool take from each other, and share what is
    coming."""
    bench = Bench(8)
    lacking = bench.rows.checkpoints.lacking
    assert lacking((8, 16)) is None and lacking((9, 20)) == (0, 1) and lacking((8, 20)) == (1, 4)
    assert lacking((9, 18), (1, 1)) == (1, 1)
    given, pool = bench.rows.checkpoints, bench.pools[1]
    lacking = Checkpoints(given.sizes, (pool, pool), given.pages, given.policy).lacking
    assert lacking((10, 6)) is None and lacking((10, 8)) == (1, 2) and lacking((10, 8), (2, 0)) is None
