"""The file store takes room on the disk as it needs it, and says when there is none."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.transfer_manager.storage import file_slabs
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from tests.rigs.file_rig import FailingDisk, Rig, space_of

NUM_SLOTS, SLOTS_PER_SLAB = 24, 8


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slabs grow by two slots of a page, at least."""
    monkeypatch.setattr(file_slabs, "_LEAST_GROWTH_BYTES", 2 * 4096)


def allocated_bytes(rig: Rig) -> int:
    """What the space takes on the disk, its journal included."""
    return sum(path.stat().st_blocks * 512 for path in rig.path.iterdir())


def slab_slots(rig: Rig) -> list[int]:
    """How many slots each slab has."""
    return [path.stat().st_size // rig.slot_bytes for path in sorted(rig.path.glob("slab-*"))]


def disk_full_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [line for line in caplog.messages if line.startswith("event=disk_full")]


def test_little_takes_little(tmp_path: Path) -> None:
    """With default settings ten objects of a MiB take at most 64 MiB on the disk, and the disk really gives them."""
    options = StorageConfig(folder=str(tmp_path), weights_id="w").store_options(tp_size=1)
    sizes = {name: options[name] for name in ("capacity_bytes", "slab_bytes")}
    with Rig(tmp_path, space=space_of(object_bytes=2**20), **sizes) as rig:
        assert rig.write(*range(10))[0] == 10
        rig.commit()
        assert 10 * 2**20 <= allocated_bytes(rig) <= 64 * 2**20
        assert rig.read(*range(10)) == 10


@pytest.mark.usefixtures("small_steps")
def test_growth_by_steps_up_to_the_capacity(tmp_path: Path) -> None:
    """Each step is half of what is there, in the same slab until that is full; nothing is evicted before the end."""
    sizes = []
    with Rig(tmp_path, num_slots=NUM_SLOTS, slots_per_slab=SLOTS_PER_SLAB) as rig:
        for number in range(NUM_SLOTS + 6):
            rig.write(number)
            assert rig.store.stats().num_evicted == max(0, number + 1 - NUM_SLOTS)
            assert allocated_bytes(rig) >= sum(slab_slots(rig)) * rig.slot_bytes
            sizes.append(slab_slots(rig))
        assert sizes[0] == sizes[1] == [2] and sizes[2] == [4] and sizes[4] == [6] and sizes[6] == [8]
        assert sizes[8] == [8, 4] and sizes[12] == [8, 8] and sizes[16] == sizes[23] == sizes[-1] == [8, 8, 8]
        for number in range(6, NUM_SLOTS + 6):
            assert rig.read(number) == 1


@pytest.mark.usefixtures("small_steps")
def test_a_slab_grows_on_after_a_reopen(tmp_path: Path) -> None:
    """What a half grown slab holds is found by the next engine, which grows it from there."""
    with Rig(tmp_path, num_slots=NUM_SLOTS, slots_per_slab=SLOTS_PER_SLAB) as rig:
        rig.write(1, 2, 3)
        assert slab_slots(rig) == [4]
    with Rig(tmp_path, num_slots=NUM_SLOTS, slots_per_slab=SLOTS_PER_SLAB) as rig:
        assert rig.read(1, 2, 3) == 3
        rig.write(4, 5)
        assert slab_slots(rig) == [6]
        assert rig.read(1, 2, 3, 4, 5) == 5


@pytest.mark.usefixtures("small_steps")
def test_a_disk_that_is_full_in_the_middle_of_a_slab(tmp_path: Path) -> None:
    """A growth that the disk refuses leaves the slab as it was, and every object in it."""
    disk = FailingDisk()
    with Rig(tmp_path, num_slots=NUM_SLOTS, slots_per_slab=SLOTS_PER_SLAB, disk=disk) as rig:
        rig.write(1, 2, 3, 4)
        disk.failing["allocate"] = errno.ENOSPC
        assert rig.write(1, 2, 3, 4, 5)[0] == 4
        assert slab_slots(rig) == [4]
        assert rig.read(1, 2, 3, 4) == 4
        del disk.failing["allocate"]
        for _ in range(16):
            rig.write(1, 2, 3, 4, 5)
        assert slab_slots(rig) == [6]
        assert rig.read(1, 2, 3, 4, 5) == 5


def test_room_that_another_engine_leaves_is_taken(tmp_path: Path) -> None:
    """A store that is short beside another engine's grows once that has ended, without being opened anew."""
    with Rig(tmp_path, num_slots=8) as rig:
        with Rig(tmp_path, space=space_of("old@1"), num_slots=8) as old:
            old.write(*range(4))
            assert rig.write(*range(8))[0] == 4
        for _ in range(17):
            rig.write(*range(8))
        assert not old.path.exists()
        assert rig.read(*range(8)) == 8


@pytest.fixture
def full_disk() -> Iterator[FailingDisk]:
    disk = FailingDisk()
    yield disk
    disk.failing.clear()


def test_a_full_disk_is_told_ever_more_rarely(
    tmp_path: Path, full_disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """However often the disk refuses a growth: lines at its first refusal, its second, its fourth and so on."""
    with Rig(tmp_path, num_slots=8, slots_per_slab=4, disk=full_disk) as rig:
        rig.write(1, 2, 3)
        assert rig.store.stats().num_full_disks == 0
        full_disk.failing["allocate"] = errno.ENOSPC
        for number in range(4, 4 + 16 * 9):
            rig.write(number)
            assert rig.store.stats().num_full_disks == int(number > 4)
        numbers = [line.partition("num_refusals=")[2].partition(" ")[0] for line in disk_full_lines(caplog)]
        assert numbers == ["1", "2", "4", "8"]
        assert all(f"folder={tmp_path} step=grow" in line and "ENOSPC" in line for line in disk_full_lines(caplog))
        full_disk.failing.clear()
        for number in range(200, 217):
            rig.write(number)
        assert rig.store.stats().num_full_disks == 0


@pytest.mark.parametrize(("method", "step"), [("write", "write"), ("sync", "commit")])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_without_room_for_what_is_written(
    tmp_path: Path, method: str, step: str, code: int, full_disk: FailingDisk, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever step finds the disk full, a quota too, is named, until it works again; other errors are not that."""
    is_full = code != errno.EIO
    with Rig(tmp_path, disk=full_disk) as rig:
        rig.write(1)
        full_disk.failing[method] = code
        with pytest.raises(Exception, match=errno.errorcode[code]):
            rig.write(2)
            rig.commit()
        assert rig.store.stats().num_full_disks == int(is_full)
        assert [f"step={step}" in line for line in disk_full_lines(caplog)] == [True] * is_full
        full_disk.failing.clear()
        rig.write(2)
        rig.commit()
        assert rig.store.stats().num_full_disks == 0
