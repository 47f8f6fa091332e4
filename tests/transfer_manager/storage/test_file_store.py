"""The file store by what its callers see."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.base import Blocks
from tests.rigs.file_rig import QuickDisk, Rig, name_of, space_of


@pytest.mark.parametrize("object_bytes", [700, 4096, 5000, 400_000])
def test_round_trip(tmp_path: Path, object_bytes: int) -> None:
    """What is written is read back, by this store at once and by the next one."""
    space = space_of(object_bytes=object_bytes)
    with Rig(tmp_path, space=space) as rig:
        assert rig.write(1, 2, 3) == (3, 3 * object_bytes)
        assert rig.read(1, 2, 3) == 3
    with Rig(tmp_path, space=space) as rig:
        assert rig.read(1, 2, 3) == 3
        assert rig.read(1, 9, 3) == 1
        assert rig.read(9) == 0
        assert rig.store.stats().num_objects == 3


def test_many_small_objects(tmp_path: Path) -> None:
    """Neighbours that go in one call, over the bounds of slabs and with holes between, keep their own bytes."""
    space = space_of(object_bytes=4096)
    with Rig(tmp_path, space=space, num_slots=32, slots_per_slab=5) as rig:
        rig.write(*range(0, 32, 2))
        rig.write(*range(1, 32, 2))
        rig.store.remove([name_of(number) for number in (3, 4, 11)])
        rig.commit()
        rig.write(*range(32))
        assert rig.read(*range(32)) == 32


def test_write_what_is_not_there(tmp_path: Path) -> None:
    """Only missing blocks are written; a second time nothing is."""
    with Rig(tmp_path) as rig:
        rig.write(1, 2)
        assert rig.write(1, 2, 3, 3) == (4, rig.object_bytes)
        assert rig.write(1, 2, 3) == (3, 0)


def test_calls_without_blocks(tmp_path: Path) -> None:
    """Empty calls are fine."""
    with Rig(tmp_path) as rig:
        assert rig.write() == (0, 0)
        assert rig.read() == 0
        assert rig.store.remove([]) == 0


def test_damaged_bits(tmp_path: Path) -> None:
    """A damaged object ends what is read, is counted and removed, and can be written again."""
    with Rig(tmp_path) as rig:
        rig.write(1, 2, 3)
        rig.spoil(2)
        assert rig.read(1, 2, 3) == 1
        assert rig.there(1, 2, 3) == [1, 3]
        assert rig.store.stats().num_damaged == 1
        assert rig.write(1, 2, 3) == (3, rig.object_bytes)
        assert rig.read(1, 2, 3) == 3


def test_a_torn_slot(tmp_path: Path) -> None:
    """Half of an object with another's other half is a miss after a reopen too."""
    with Rig(tmp_path) as rig:
        rig.write(1, 2)
        rig.spoil(1, b"\x55" * 2048, at=2048)
    with Rig(tmp_path) as rig:
        assert rig.read(1) == 0
        assert rig.read(2) == 1


def test_swapped_objects(tmp_path: Path) -> None:
    """An object in another's slot is no hit, whole as it is."""
    with Rig(tmp_path) as rig:
        rig.write(1, 2)
        data = (rig.path / "slab-00000").read_bytes()
        size, one, two = rig.slot_bytes, rig.slot_of(1), rig.slot_of(2)
        rig.spoil(1, data[two * size : (two + 1) * size], at=0)
        rig.spoil(2, data[one * size : (one + 1) * size], at=0)
        assert rig.read(1) == rig.read(2) == 0


def test_eviction_while_reading(tmp_path: Path) -> None:
    """An object whose slot goes to another while it is read is a miss, not damage; the other stays."""
    with Rig(tmp_path, num_slots=1) as rig:
        rig.write(1)
        rig.commit()
        index, find = rig.store._index, rig.store._index.find_leading

        def find_and_evict(hashes: list[bytes]) -> list[object]:
            found = find(hashes)
            index.find_leading = find
            rig.write(2)
            return found

        index.find_leading = find_and_evict
        assert rig.read_any(1) == 0
        assert rig.store.stats().num_damaged == 0
        assert rig.read(2) == 1


def test_two_openers(tmp_path: Path) -> None:
    """A second engine is told what to do, and the first one goes on."""
    with Rig(tmp_path) as rig:
        rig.write(1)
        with pytest.raises(StorageRefusedError, match="give each engine a folder of its own") as caught:
            Rig(tmp_path)
        assert str(rig.path) in str(caught.value)
        assert rig.read(1) == 1


def test_two_spaces(tmp_path: Path) -> None:
    """Ranks of one engine have a folder in common and nothing else."""
    with Rig(tmp_path) as one, Rig(tmp_path, space=space_of(rank=1)) as two:
        one.write(1)
        two.write(2)
        assert (one.there(1, 2), two.there(1, 2)) == ([1], [2])
        assert one.store.stats().num_objects == 1


@pytest.mark.parametrize("other", [space_of("llama@2"), space_of(rank=1), space_of(object_bytes=8192)])
def test_other_spaces_never_hit(tmp_path: Path, other: object) -> None:
    """Nothing of other weights, another rank or another layout is found."""
    with Rig(tmp_path) as rig:
        rig.write(1, 2)
    with Rig(tmp_path, space=other) as rig:
        assert rig.there(1, 2) == []


def test_capacity(tmp_path: Path) -> None:
    """The slabs never take more than the capacity, and hold as many objects as fit."""
    with Rig(tmp_path, num_slots=6, slots_per_slab=4) as rig:
        for number in range(0, 40, 2):
            rig.write(number, number + 1)
            assert sum(slab.stat().st_size for slab in rig.path.glob("slab-*")) <= 6 * rig.slot_bytes
        assert rig.store.stats().num_objects == 6
        assert rig.store.stats().num_evicted == 34
        assert rig.read(36, 37, 38, 39) == 4


def test_less_capacity(tmp_path: Path) -> None:
    """With less capacity the oldest files' ends are given back, and what was in them is gone; with more it grows."""
    with Rig(tmp_path, num_slots=8) as rig:
        rig.write(*range(8))
    with Rig(tmp_path, num_slots=3) as rig:
        assert len(rig.there(*range(8))) == 3
        assert sum(slab.stat().st_size for slab in rig.path.glob("slab-*")) == 3 * rig.slot_bytes
        for number in rig.there(*range(8)):
            assert rig.read(number) == 1
    with Rig(tmp_path, num_slots=9) as rig:
        assert rig.write(*range(9))[0] == 9
        assert rig.read(*range(9)) == 9


def test_capacity_below_one_object(tmp_path: Path) -> None:
    """Refused, with both numbers."""
    with pytest.raises(StorageRefusedError, match=r"capacity_bytes is 4000 .* one object takes 4096"):
        Rig(tmp_path, capacity_bytes=4000)


def test_memory_of_another_layout(tmp_path: Path) -> None:
    """Memory whose blocks are not of the space's size is refused."""
    with Rig(tmp_path) as rig, pytest.raises(StorageRefusedError, match="10 bytes per block"):
        type(rig.store)({"folder": tmp_path, "capacity_bytes": 10**6}, rig.space, np.zeros((2, 10), np.uint8))


def test_eviction_order(tmp_path: Path) -> None:
    """The longest unused chain goes first, and of a chain its end."""
    with Rig(tmp_path, num_slots=6) as rig:
        rig.write(1, 2, 3)
        rig.write(4, 5, 6)
        rig.read(1, 2, 3)
        rig.write(7)
        assert rig.there(*range(1, 8)) == [1, 2, 3, 4, 5, 7]
        rig.write(1, 2)
        rig.write(8, 9, 10)
        assert rig.there(*range(1, 11)) == [1, 2, 7, 8, 9, 10]


def test_the_order_of_use_outlives_the_process(tmp_path: Path) -> None:
    """What was read last before the close is evicted last after it."""
    with Rig(tmp_path, num_slots=3) as rig:
        rig.write(1, 2, 3)
        rig.read(3)
    with Rig(tmp_path, num_slots=3) as rig:
        rig.write(4, 5)
        assert rig.there(1, 2, 3, 4, 5) == [3, 4, 5]


def test_a_chain_longer_than_the_store(tmp_path: Path) -> None:
    """Its beginning is written, also when a part of it was there; it never evicts itself."""
    with Rig(tmp_path, num_slots=4) as rig:
        rig.write(9, 3)
        assert rig.write(*range(6))[0] == 4
        assert rig.there(*range(10)) == [0, 1, 2, 3]
        assert rig.write(*range(6))[0] == 4


def test_admission_second_use(tmp_path: Path) -> None:
    """What is offered for the first time is remembered only, and counted; the second time it is written."""
    with Rig(tmp_path, admission="second_use") as rig:
        assert rig.write(1, 2) == (0, 0)
        assert rig.write(1, 2, 3) == (2, 2 * rig.object_bytes)
        assert rig.store.stats().num_declined == 3
        assert rig.write(1, 2, 3)[0] == 3


def test_admission_remembers_a_bounded_number(tmp_path: Path) -> None:
    """What was offered too long ago is offered for the first time again."""
    with Rig(tmp_path, admission="second_use") as rig:
        rig.write(1)
        rig.store.write(Blocks(hashes=[name_of(n) for n in range(10, 1010)], buffers=[memoryview(b"")] * 1000))
        rig.store.write(Blocks(hashes=[name_of(n) for n in range(2000, 2100)], buffers=[memoryview(b"")] * 100))
        assert rig.write(1) == (0, 0)
        assert len(rig.store._admission._remembered) == 1024


def test_admission_by_priority(tmp_path: Path) -> None:
    """Only requests of enough priority write."""
    with Rig(tmp_path, admission="priority", min_priority=60.0) as rig:
        assert rig.write(1)[0] == 0
        assert rig.write(1, priority=59.0)[0] == 0
        assert rig.write(1, priority=60.0)[0] == 1
        assert rig.write(1)[0] == 1
        assert rig.store.stats().num_declined == 2


def test_remove(tmp_path: Path) -> None:
    """Removed objects are gone, now and after a reopen, and leave room."""
    with Rig(tmp_path, num_slots=3) as rig:
        rig.write(1, 2, 3)
        rig.commit()
        assert rig.store.remove([name_of(2), name_of(2), name_of(9)]) == 1
        assert rig.there(1, 2, 3) == [1, 3]
        rig.write(4)
        assert rig.store.stats().num_evicted == 0
    with Rig(tmp_path, num_slots=3) as rig:
        assert rig.there(1, 2, 3, 4) == [1, 3, 4]


def test_clear(tmp_path: Path) -> None:
    """All objects of these weights go, in other spaces too, but not of spaces in use; other weights stay."""
    same_weights, other, in_use = space_of(object_bytes=8192), space_of("llama@2"), space_of(rank=1)
    for space in (same_weights, other):
        with Rig(tmp_path, space=space, num_slots=100) as rig:
            rig.write(1)
    with Rig(tmp_path, space=in_use) as second, Rig(tmp_path, num_slots=100) as rig:
        rig.write(1, 2)
        rig.commit()
        second.write(1)
        assert rig.store.clear("llama@1") == 3
        assert rig.there(1, 2) == []
        assert second.read(1) == 1
        assert not (tmp_path / same_weights.digest).exists()
        rig.write(2)
        assert rig.store.clear("llama@2") == 1
        assert rig.read(2) == 1
    with Rig(tmp_path) as rig:
        assert rig.there(1, 2) == [2]


def test_reopen_counts(tmp_path: Path) -> None:
    """A reopened store knows what it holds, and gives room for no more than that leaves."""
    with Rig(tmp_path, num_slots=6) as rig:
        rig.write(1, 2, 3, 4, 5)
    with Rig(tmp_path, num_slots=6) as rig:
        stats = rig.store.stats()
        assert (stats.num_objects, stats.num_bytes) == (5, 5 * rig.object_bytes)
        rig.write(6)
        assert rig.store.stats().num_evicted == 0
        rig.write(7)
        assert rig.store.stats().num_evicted == 1


def test_old_spaces_make_room(tmp_path: Path) -> None:
    """Spaces of other weights go, oldest first, as the rank's own needs room; other ranks' and those in use stay."""
    olds = [space_of(f"old@{i}") for i in range(3)]
    for i, space in enumerate((*olds, space_of("old@0", rank=1))):
        with Rig(tmp_path, space=space, num_slots=16) as rig:
            rig.write(*range(4))
        os.utime(rig.path / "journal", (1000 + i, 1000 + i))
    with Rig(tmp_path, space=olds[0], num_slots=16), Rig(tmp_path, num_slots=16) as rig:
        rig.write(*range(4))
        assert [(tmp_path / space.digest).exists() for space in olds] == [True, True, True]
        rig.write(*range(8))
        assert [(tmp_path / space.digest).exists() for space in olds] == [True, False, True]
        rig.write(*range(12))
        assert [(tmp_path / space.digest).exists() for space in olds] == [True, False, False]
        rig.write(*range(16))  # the space in use keeps its room
        assert rig.store.stats().num_objects == 12
    assert (tmp_path / space_of("old@0", rank=1).digest).exists()


def test_old_spaces_beyond_the_capacity_go_at_once(tmp_path: Path) -> None:
    """Already the opening removes what no longer fits."""
    with Rig(tmp_path, space=space_of("old@1"), num_slots=16) as old:
        old.write(*range(8))
    with Rig(tmp_path, num_slots=4):
        assert not old.path.exists()


def test_the_journal_stays_small(tmp_path: Path) -> None:
    """However much is written and removed, the journal is bounded, and says the same."""
    with Rig(tmp_path, num_slots=4, disk=QuickDisk()) as rig:
        for number in range(2000):
            rig.write(number)
            rig.commit()
        assert (rig.path / "journal").stat().st_size < 2 * 60 * 1100
    with Rig(tmp_path, num_slots=4) as rig:
        assert rig.read(1999) == 1
        assert rig.there(*range(1990, 2000)) == [1996, 1997, 1998, 1999]
