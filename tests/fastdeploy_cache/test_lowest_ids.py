"""A pool beside a naive one: the same ids, owners and refusals, whatever is taken and given back in which order."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable

import pytest

from fastdeploy_cache.books.block_pool import BlockPool, Owner
from fastdeploy_cache.books.id_table import IdTable, IdTableInPython, new_id_table
from fastdeploy_cache.errors import BlockOwnerError

OWNERS = (Owner.RUN, Owner.REQUEST, Owner.TASK, Owner.CALLER, Owner.CHECKPOINT)
WHOLE = (Owner.RUN, Owner.CHECKPOINT)
NUM_STEPS = 200
TABLES = list(dict.fromkeys((new_id_table, IdTableInPython)))


class NaivePool:
    """Walks over all blocks, each time."""

    def __init__(self, num_blocks: int) -> None:
        self.owners = [Owner.FREE] * num_blocks
        self.num_readers = [0] * num_blocks
        self.deferred = set[int]()  # freed, and still being read
        self.marked, self.soiled = set[int](), set[int]()  # to be wiped when freed, and freed since

    def ids_of(self, owner: Owner) -> list[int]:
        return [i for i, each in enumerate(self.owners) if each is owner]

    def allocate(self, num_blocks: int, owner: Owner) -> list[int]:
        ids = self.ids_of(Owner.FREE)[:num_blocks]
        for block_id in ids:
            self.owners[block_id] = owner
        return ids

    def give(self, ids: list[int], owner: Owner) -> None:
        for block_id in ids:
            self.owners[block_id] = owner
        if owner in WHOLE:
            self.marked.difference_update(ids)

    def free(self, ids: list[int]) -> None:
        for block_id in ids:
            is_marked = block_id in self.marked
            self.owners[block_id] = Owner.TASK if self.num_readers[block_id] or is_marked else Owner.FREE
            if self.num_readers[block_id]:
                self.deferred.add(block_id)
            elif is_marked:
                self.soil(block_id)

    def soil(self, block_id: int) -> None:
        self.owners[block_id] = Owner.TASK
        self.marked.discard(block_id)
        self.soiled.add(block_id)

    def mark(self, ids: list[int]) -> None:
        self.marked.update(set(ids) - self.soiled)

    def read(self, ids: list[int], change: int) -> None:
        for block_id in ids:
            self.num_readers[block_id] += change
        self.free(gone := [i for i in self.deferred if not self.num_readers[i]])
        self.deferred.difference_update(gone)


class Walk:
    """Random calls of both; `check` compares them."""

    def __init__(self, seed: int, new_table: Callable[[int], IdTable]) -> None:
        self.rng = random.Random(seed)
        self.num_blocks = self.rng.choice((0, 1, 7, 40, 300, 1500))
        self.pool, self.naive = BlockPool("GPU", self.num_blocks, new_table), NaivePool(self.num_blocks)
        self.reads: list[list[int]] = []
        self.wiping: list[list[int]] = []

    def some(self, owner: Owner) -> list[int]:
        """Ids of an owner: in a row, in rows, or scattered; lowest first or not; none that is freed already, or being
        wiped."""
        own = [i for i in self.naive.ids_of(owner) if i not in self.naive.deferred | self.naive.soiled]
        own = [i for i in own if not any(i in ids for ids in self.wiping)]
        if not own:
            return own
        most = self.rng.choice((1, 4, 20, 100, len(own)))
        kind = self.rng.randrange(4)
        if kind == 0:
            own = self.rng.sample(own, min(most, len(own)))
        elif kind == 1:
            start = self.rng.randrange(len(own))
            own = own[start : start + most]
        elif kind == 2:
            own = [i for i in own if i // 9 % 3 == 0][:most]
        else:
            own = own[:: self.rng.randint(1, 3)][-most:]
        if self.rng.random() < 0.2:
            self.rng.shuffle(own)
        return own

    def step(self) -> None:
        """One call that may be made, or one that is refused."""
        owner, rng = self.rng.choice(OWNERS), self.rng
        doing = rng.choice(("take", "take", "free", "free", "give", "refuse", "read", "end", "wipe", "wipe"))
        if doing == "take":
            num_blocks = rng.randint(0, min(self.pool.num_free, rng.choice((1, 5, 90, self.num_blocks))))
            assert self.pool.allocate(num_blocks, owner).tolist() == self.naive.allocate(num_blocks, owner)
        elif doing == "free":
            packed = array("i", ids := self.some(owner))
            if rng.random() < 0.3:
                self.pool.free_each(iter(ids), owner)
            else:
                self.pool.free(memoryview(packed) if ids and rng.random() < 0.3 else packed, owner)
            self.naive.free(ids)
        elif doing == "give":
            self.pool.hand_over(array("i", ids := self.some(owner)), owner, taker := rng.choice(OWNERS))
            self.naive.give(ids, taker)
        elif doing == "refuse":
            self.refuse(owner)
        elif doing == "read" and len(self.reads) < 5:
            self.reads.append(ids := self.some(owner))
            self.pool.begin_reading(array("i", ids))
            self.naive.read(ids, 1)
        elif doing == "end" and self.reads:
            ids = self.reads.pop(rng.randrange(len(self.reads)))
            self.pool.end_reading(array("i", ids))
            self.naive.read(ids, -1)
        elif doing == "wipe":
            self.wipe(owner)

    def wipe(self, owner: Owner) -> None:
        """Nobody else may see what some blocks hold, or what no run has; or what waits is taken to be wiped; or it is,
        or could not be."""
        doing, naive = self.rng.randrange(6), self.naive
        if doing == 0:
            self.pool.taint(array("i", ids := self.some(owner)))
            naive.mark(ids)
        elif doing == 1 and self.rng.random() < 0.3:
            self.pool.note_stale()
            naive.mark([i for i, each in enumerate(naive.owners) if each not in WHOLE])
        elif doing == 2:
            self.pool.soil_stale(at_most := self.rng.randint(1, 50))
            for block_id in [i for i in naive.ids_of(Owner.FREE) if i in naive.marked][:at_most]:
                naive.soil(block_id)
        elif doing == 3:
            self.wiping.append(ids := self.pool.take_soiled().tolist())
            assert set(ids) == naive.soiled and len(ids) == len(naive.soiled)
            naive.soiled.clear()
        elif doing == 4 and self.wiping:
            self.pool.free(array("i", ids := self.wiping.pop()), Owner.TASK)
            naive.free(ids)
        elif doing == 5 and self.wiping:
            self.pool.soil(ids := self.wiping.pop(0))
            naive.marked.difference_update(ids)
            naive.soiled.update(ids)

    def refuse(self, owner: Owner) -> None:
        """One wrong id among right ones, anywhere."""
        ids = self.some(owner)
        others = [i for i, each in enumerate(self.naive.owners) if each is not owner]
        others = [*others[:1], *others[-1:], *sorted(self.naive.deferred)[:1], *sorted(self.naive.soiled)[:1]]
        wrong = self.rng.choice([-1, -self.num_blocks, self.num_blocks, 2**31 - 1, *others, *ids[:1]])
        calls: list[tuple[Callable[..., None], list[int]]] = [(self.pool.free_each, [wrong])] * (wrong not in ids)
        ids.insert(self.rng.randint(0, len(ids)), wrong)
        for call, given in (*calls, (self.pool.check, ids), (self.pool.free, ids)):
            with pytest.raises(BlockOwnerError, match=f"block {wrong}[ ;]"):
                call(array("i", given), owner)

    def check(self) -> None:
        """Both say the same of every block."""
        assert [self.pool.owner(i) for i in range(self.num_blocks)] == self.naive.owners
        naive, marked_free = self.naive, [i for i in self.naive.ids_of(Owner.FREE) if i in self.naive.marked]
        assert set(self.pool.deferred_ids) == naive.deferred | naive.soiled
        assert (self.pool.num_soiled, self.pool.num_marked) == (len(naive.soiled), len(naive.marked))
        assert self.pool.num_stale == len(marked_free)
        assert self.pool.num_read_out == len(naive.deferred & naive.marked)
        for owner in Owner:
            ids = self.naive.ids_of(owner)
            assert self.pool.count(owner) == len(ids) and self.pool.ids_of(owner) == ids
            assert self.pool.num_read_of(owner) == sum(self.naive.num_readers[i] > 0 for i in ids)


@pytest.mark.parametrize("new_table", TABLES)
@pytest.mark.parametrize("seed", range(30))
def test_a_pool_does_what_a_naive_one_does(seed: int, new_table: Callable[[int], IdTable]) -> None:
    """The lowest free ids, in order, and every refusal names the wrong one and changes nothing; also while blocks are
    being read. The native table and that in Python."""
    walk = Walk(seed, new_table)
    for _ in range(NUM_STEPS):
        walk.step()
        walk.check()


@pytest.mark.parametrize("new_table", TABLES)
def test_a_table_refuses_what_is_no_such_call(new_table: Callable[[int], IdTable]) -> None:
    """More than are free, or for nobody: a `ValueError`. A block of another, twice, or outside: False. Nothing has
    changed."""
    table = new_table(300)
    mine = table.take(200, Owner.TASK)
    for num_blocks, owner in ((101, Owner.RUN), (-1, Owner.RUN), (1, Owner.FREE)):
        with pytest.raises(ValueError, match="blocks for owner"):
            table.take(num_blocks, owner)
    for bad in (0, 200, 300, -1, 2**31 - 1):
        assert not table.move(array("i", [7, 0, bad]), Owner.TASK, Owner.FREE)
    assert [table.count(owner) for owner in Owner] == [100, 0, 0, 200, 0, 0]
    assert table.owners == bytes([Owner.TASK] * 200 + [Owner.FREE] * 100)
    assert table.move(mine, Owner.TASK, Owner.FREE) and table.take(300, Owner.RUN).tolist() == list(range(300))
