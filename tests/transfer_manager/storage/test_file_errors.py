"""The file store when something goes wrong: full and broken disks, vanished folders, errors in the background."""

from __future__ import annotations

import errno
import shutil
import threading
from pathlib import Path

import pytest

from fastdeploy_cache.errors import StorageError, StorageGoneError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage.file_commit import Commits
from tests.rigs.file_rig import FailingDisk, Rig, space_of
from tests.rigs.leaks import num_descriptors


def test_no_room_beside_spaces_in_use(tmp_path: Path) -> None:
    """A folder that another engine fills gives a StorageError that says so."""
    with Rig(tmp_path, space=space_of("old@1"), num_slots=4) as old, Rig(tmp_path, num_slots=4) as rig:
        old.write(*range(4))
        with pytest.raises(StorageError, match="give each engine a folder of its own"):
            rig.write(1)
        assert rig.there(1) == []


def test_disk_full(tmp_path: Path) -> None:
    """Without room for a further slab the store goes on within those that it has."""
    disk = FailingDisk()
    with Rig(tmp_path, num_slots=8, slots_per_slab=4, disk=disk) as rig:
        rig.write(1, 2, 3)
        disk.failing["allocate"] = errno.ENOSPC
        assert rig.write(4, 5, 6)[0] == 3
        assert rig.store.stats().num_objects == 4
        assert not (rig.path / "slab-00001").exists()
        assert rig.read(4, 5, 6) == 3


def test_disk_full_from_the_beginning(tmp_path: Path) -> None:
    """Without any slab a write fails; once there is room, it works."""
    disk = FailingDisk(allocate=errno.ENOSPC)
    with Rig(tmp_path, disk=disk) as rig:
        with pytest.raises(StorageError, match="ENOSPC"):
            rig.write(1)
        assert rig.read(1) == 0
        del disk.failing["allocate"]
        assert rig.write(1)[0] == 1


@pytest.mark.parametrize("method", ["make_folder", "open", "write", "sync", "rename"])
def test_a_folder_that_cannot_be_written(tmp_path: Path, method: str) -> None:
    """A read-only or missing mount is an error that may pass, and leaves nothing open."""
    num_open = num_descriptors()
    with pytest.raises(StorageError, match="EROFS") as caught:
        Rig(tmp_path / "new", disk=FailingDisk(**{method: errno.EROFS}))
    assert not isinstance(caught.value, StorageRefusedError)
    assert num_descriptors() == num_open


def test_nothing_stays_open(tmp_path: Path) -> None:
    """A closed store has given back descriptors and threads; a second close is fine, other calls are not."""
    num_open, num_threads = num_descriptors(), threading.active_count()
    space = space_of(object_bytes=400_000)
    rig = Rig(tmp_path, space=space, in_background=True)
    rig.write(1, 2, 3, 4, 5)
    rig.read(1, 2, 3, 4, 5)
    rig.close()
    rig.close()
    assert (num_descriptors(), threading.active_count()) == (num_open, num_threads)
    with pytest.raises(StorageGoneError, match="closed"):
        rig.read(1)


@pytest.mark.parametrize("verb", ["write", "commit"])
def test_a_vanished_folder(tmp_path: Path, verb: str) -> None:
    """Once the folder is gone, every call says so, and the store can be closed and opened anew."""
    with Rig(tmp_path / "store") as rig:
        rig.write(1)
        shutil.rmtree(tmp_path / "store")
        with pytest.raises(StorageGoneError, match="open the store anew"):
            rig.write(2) if verb == "write" else rig.commit()
        for call in (lambda: rig.read(1), lambda: rig.write(1), lambda: rig.there(1), lambda: rig.store.remove([])):
            with pytest.raises(StorageGoneError):
                call()
    with Rig(tmp_path / "store") as rig:
        assert rig.there(1) == []
        assert rig.write(1)[0] == 1


def test_a_read_error(tmp_path: Path) -> None:
    """What the disk cannot read is a miss, and removed."""
    disk = FailingDisk()
    with Rig(tmp_path, disk=disk) as rig:
        rig.write(1, 2, 3)
        disk.failing["read"], disk.after = errno.EIO, 0
        assert rig.read(1, 2, 3) == 0
        del disk.failing["read"]
        assert rig.there(1, 2, 3) == []
        assert rig.store.stats().num_damaged == 3


def test_a_bad_spot_costs_only_its_object(tmp_path: Path) -> None:
    """Small objects are read together; if that fails, each is tried alone."""
    disk = FailingDisk()
    with Rig(tmp_path, disk=disk) as rig:
        rig.write(1, 2, 3)
        read = disk.read

        def bad_spot(fd: int, buffers: list[memoryview], offset: int) -> None:
            if offset <= rig.slot_of(2) * rig.slot_bytes < offset + len(buffers) * rig.slot_bytes:
                raise OSError(errno.EIO, "bad spot")
            read(fd, buffers, offset)

        disk.read = bad_spot
        assert rig.read(1, 2, 3) == 1
        assert rig.there(1, 2, 3) == [1, 3]


def test_a_write_error(tmp_path: Path) -> None:
    """A failed write leaves no object, and its slots can be used."""
    disk = FailingDisk()
    with Rig(tmp_path, num_slots=3, disk=disk) as rig:
        rig.write(1)
        disk.failing["write"], disk.after = errno.EIO, 0
        with pytest.raises(StorageError, match="EIO"):
            rig.write(1, 2, 3)
        del disk.failing["write"]
        assert rig.there(1, 2, 3) == [1]
        assert rig.write(1, 2, 3)[0] == 3
        assert rig.store.stats().num_evicted == 0


def test_a_failed_sync_of_a_slab(tmp_path: Path) -> None:
    """What the disk may have lost is forgotten; a next commit works."""
    disk = FailingDisk()
    with Rig(tmp_path, disk=disk) as rig:
        rig.write(1)
        rig.commit()
        rig.write(2)
        disk.failing["sync"] = errno.EIO
        with pytest.raises(OSError, match="EIO"):
            rig.commit()
        del disk.failing["sync"]
        assert rig.there(1, 2) == [1]
        rig.write(2)
    with Rig(tmp_path) as rig:
        assert rig.read(1, 2) == 2


@pytest.mark.parametrize("after", [0, 1])
def test_a_failed_journal(tmp_path: Path, after: int) -> None:
    """When the journal cannot be written, nothing is lost: it is written anew by the next commit, or by the close."""
    disk = FailingDisk()
    with Rig(tmp_path, num_slots=2, disk=disk) as rig:
        rig.write(1, 2)
        rig.commit()
        rig.write(3)
        disk.failing["write" if not after else "sync"], disk.after = errno.ENOSPC, after
        with pytest.raises(OSError, match="ENOSPC"):
            rig.commit()
        disk.failing.clear()
    with Rig(tmp_path, num_slots=2) as rig:
        assert rig.there(1, 2, 3) == [1, 3]
        assert rig.read(1) == rig.read(3) == 1


def test_background_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a close, what was written gets durable by itself."""
    done = threading.Event()
    commit = Commits.commit
    monkeypatch.setattr(Commits, "commit", lambda self: (commit(self), done.set()))
    with Rig(tmp_path, in_background=True) as rig:
        rig.write(1)
        assert done.wait(10)
        assert not rig.store._index.fresh()


def test_a_background_error_comes_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What fails in the background is raised by the next write, once."""
    failed = threading.Event()
    disk = FailingDisk()

    class Stored(Commits):
        def __setattr__(self, name: str, value: object) -> None:
            super().__setattr__(name, value)
            if name == "_failure" and value:
                failed.set()

    monkeypatch.setattr("fastdeploy_cache.transfer_manager.storage.file_store.Commits", Stored)
    with Rig(tmp_path, disk=disk, in_background=True) as rig:
        disk.failing["sync"] = errno.EIO
        rig.write(1)
        assert failed.wait(10)
        del disk.failing["sync"]
        with pytest.raises(StorageError, match="EIO"):
            rig.write(2)
        assert rig.write(2)[0] == 1


def test_reading_and_writing_at_a_time(tmp_path: Path) -> None:
    """One thread reads while another writes and evicts: every hit is whole, and nothing counts as damaged."""
    with Rig(tmp_path, num_slots=16, slots_per_slab=4, in_background=True) as rig:
        errors: list[BaseException] = []

        def write() -> None:
            try:
                for number in range(1500):
                    rig.write(number % 40, number % 40 + 1, number % 7)
            except BaseException as error:
                errors.append(error)

        writer = threading.Thread(target=write)
        writer.start()
        number = 0
        while writer.is_alive():
            number += 1
            rig.read(number % 40, number % 40 + 1)
        writer.join()
        assert not errors
        assert rig.store.stats().num_damaged == 0
