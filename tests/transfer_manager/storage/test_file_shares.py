"""Shares of a file store's slots: whose objects go for whom, beside a naive account of the same."""

from __future__ import annotations

import errno
import hashlib
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastdeploy_cache.transfer_manager.storage.base import Blocks
from fastdeploy_cache.transfer_manager.storage.file_shares import SlotShare, SlotShares
from fastdeploy_cache.transfer_manager.storage.keys import owned, owner_mark, page_names
from tests.rigs.file_rig import OBJECT_BYTES, FailingDisk, Rig

_A, _B, _OTHER = owner_mark("a"), owner_mark("b"), owner_mark("other")
_NUM_SLOTS = 20
_SHARES = [(_A, 0.4, 1.0), (_B, 0.1, 0.25)]  # 8 guaranteed; 2 guaranteed and 5 at most


def name_of(owner: bytes, number: int, *, is_image: bool = False) -> bytes:
    name = hashlib.sha256(b"%d" % number).digest()
    return owned(page_names(name, 1)[0] if is_image else name, owner)


def write(rig: Rig, owner: bytes, *numbers: int, above: Sequence[int] = (), is_image: bool = False) -> int:
    """How many of these the store has afterwards, from the first on; behind others, or pages of a checkpoint."""
    buffers = [memoryview(bytes([number % 256]) * OBJECT_BYTES) for number in numbers]
    return rig.store.write(
        Blocks(
            hashes=[name_of(owner, number, is_image=is_image) for number in numbers],
            buffers=buffers,
            owner=owner,
            above=[name_of(owner, number) for number in above],
        )
    ).num_leading


def there(rig: Rig, owner: bytes, *numbers: int) -> list[int]:
    return [number for number in numbers if rig.store.find([name_of(owner, number)])[0]]


def test_a_flood_leaves_what_is_guaranteed(tmp_path: Path) -> None:
    """Beside it the tenant keeps its guarantee, what is above goes; a new store goes on with the same order."""
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        assert write(rig, _A, *range(12)) == 12
        for number in range(100, 160, 4):
            assert write(rig, _OTHER, *range(number, number + 4)) == 4
        kept = there(rig, _A, *range(12))
        assert len(kept) == 8 and kept == list(range(8))  # the end of a chain goes first
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        for number in range(200, 240, 4):
            write(rig, _OTHER, *range(number, number + 4))
        assert there(rig, _A, *range(12)) == kept


def test_its_own_need_may_take_its_guarantee(tmp_path: Path) -> None:
    """A tenant that has the whole store writes on; another one takes what is above the guarantee, and no more."""
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        for number in range(0, 60, 4):
            assert write(rig, _A, *range(number, number + 4)) == 4
        assert len(there(rig, _A, *range(60))) == _NUM_SLOTS
        assert write(rig, b"", *range(100, 132)) == 12
        assert len(there(rig, _A, *range(60))) == 8


def test_nobody_has_more_than_its_most(tmp_path: Path) -> None:
    """Its own oldest go, though others have room; of a chain that is longer than its most the beginning is stored."""
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        assert write(rig, _B, 1, 2, 3, 4) == 4
        assert write(rig, _B, 5, 6) == 2
        assert there(rig, _B, *range(1, 7)) == [1, 2, 3, 5, 6]
        assert write(rig, _B, *range(10, 22)) == 5
        assert there(rig, _B, *range(1, 30)) == [10, 11, 12, 13, 14]
        assert write(rig, _B, *range(10, 22)) == 5


def test_a_chain_in_pieces_keeps_its_beginning(tmp_path: Path) -> None:
    """Longer than its most, and written in calls: no piece goes for a later one, and what is older goes first."""
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        assert write(rig, _B, 30, 31) == 2
        for first, num_stored in ((0, 2), (2, 2), (4, 1), (6, 0), (8, 0)):
            assert write(rig, _B, first, first + 1, above=range(first)) == num_stored
        assert there(rig, _B, *range(40)) == [0, 1, 2, 3, 4]


def test_an_image_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    """One that does not fit into its owner's share takes nothing away."""
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        write(rig, _B, 0, 1, 2)
        assert write(rig, _B, *range(50, 53), above=range(3), is_image=True) == 0
        assert there(rig, _B, 0, 1, 2) == [0, 1, 2]
        assert write(rig, _B, 50, 51, above=range(3), is_image=True) == 2


def test_no_more_of_its_own_goes_than_is_needed(tmp_path: Path) -> None:
    """Others give one, which is enough; evictions in large numbers are for what others give."""
    shares = [(_A, 20 / 1280, 1.0), (_B, 0.984, 1.0)]
    with Rig(tmp_path, num_slots=1280, slots_per_slab=1280, shares=shares) as rig:
        for first in range(0, 1260, 20):
            write(rig, _B, *range(first, first + 20))
        write(rig, _A, *range(5000, 5020))
        assert write(rig, _A, 5050) == 1
        assert len(there(rig, _A, *range(5000, 5051))) >= 20


def test_a_full_disk_has_shares_of_what_there_is(tmp_path: Path) -> None:
    """Guarantees of slots that cannot be had starve nobody."""
    disk = FailingDisk()
    with Rig(tmp_path, num_slots=40, disk=disk, shares=[(_A, 0.5, 1.0), (_B, 0.4, 1.0)]) as rig:
        write(rig, _A, *range(8))
        disk.failing["allocate"] = errno.ENOSPC
        for first in range(8, 40, 4):
            write(rig, _A, *range(first, first + 4))
        num_slots = len(there(rig, _A, *range(40)))
        assert num_slots < 20
        assert write(rig, _B, *range(100, 103)) == 3 and write(rig, _OTHER, 200) == 1


@pytest.mark.parametrize("seed", range(6))
def test_random_writes_keep_every_promise(tmp_path: Path, seed: int) -> None:
    """After each write: nobody is above its most, and nobody below its guarantee has lost anything to others."""
    draw = random.Random(seed)
    with Rig(tmp_path, num_slots=_NUM_SLOTS, shares=_SHARES) as rig:
        has: dict[bytes, set[int]] = {_A: set(), _B: set(), _OTHER: set(), b"": set()}
        for step in range(400):
            owner = draw.choice(list(has))
            first = draw.randrange(40)
            numbers = range(first, first + draw.randrange(1, 7))
            before = {each: set(there(rig, each, *range(50))) for each in has}
            num_leading = write(rig, owner, *numbers)
            if draw.random() < 0.1:
                rig.store.remove([name_of(owner, draw.randrange(40))])
                before[owner] -= {number for number in before[owner] if number not in there(rig, owner, number)}
            after = {each: set(there(rig, each, *range(50))) for each in has}
            assert sum(map(len, after.values())) <= _NUM_SLOTS and len(after[_B]) <= 5, step
            for each, least in ((_A, 8), (_B, 2)):
                if each != owner and before[each] - after[each]:
                    assert len(after[each]) >= least, (step, each)
            assert num_leading <= len(numbers) and (num_leading or owner == _B or not numbers), step


@given(
    st.lists(st.tuples(st.sampled_from([_A, _B, _OTHER]), st.integers(0, 30)), max_size=60),
    st.integers(1, 8),
    st.integers(0, 8),
    st.integers(0, 3),
    st.sampled_from([_A, _B, _OTHER]),
)
def test_victims_are_those_of_a_naive_account(
    uses: list[tuple[bytes, int]], num: int, num_needed: int, num_kept: int, owner: bytes
) -> None:
    """One after the other: the least recently used of all who have more than is guaranteed to them, then as many
    of its own as are needed."""
    least = {_A: 4, _B: 2, _OTHER: 0}
    shares = SlotShares([SlotShare(each, least[each] / 100, 1.0) for each in (_A, _B)], 100)
    order = dict[bytes, bytes]()  # name -> whose, the last used last
    for each, number in uses:
        name = name_of(each, number)
        shares.touch(name)
        order.pop(name, None)
        order[name] = each
    last_uses = {name_of(each, number) for each, number in uses[len(uses) - num_kept :]}
    left, expected = dict(order), list[bytes]()
    while len(expected) < num:
        counts = {each: sum(other == each for other in left.values()) for each in least}
        may_go = [name for name, each in left.items() if counts[each] > least[each] and name not in last_uses]
        if not may_go:
            break
        expected.append(may_go[0])
        del left[may_go[0]]
    own = [name for name, each in left.items() if each == owner and name not in last_uses]
    expected += own[: max(0, num_needed - len(expected))]
    assert shares.victims(num, num_needed, last_uses, owner) == expected
