"""What an operator sees and does in a folder of file stores."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fastdeploy_cache.errors import StorageError, StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import file_admin
from fastdeploy_cache.transfer_manager.storage.admin import Cleared
from fastdeploy_cache.transfer_manager.storage.file_admin import FileAdmin
from fastdeploy_cache.transfer_manager.storage.file_check import SpaceCheck
from tests.rigs.file_rig import Rig, space_of


def admin_of(folder: Path) -> FileAdmin:
    return FileAdmin({"folder": str(folder)})


def fill(folder: Path, *weights_ids: str) -> list[Path]:
    """A closed space of four objects each, older ones first."""
    paths = []
    for i, weights_id in enumerate(weights_ids):
        with Rig(folder, space=space_of(weights_id), num_slots=100) as rig:
            rig.write(1, 2, 3, 4)
        os.utime(rig.path / "journal", (1000 + i, 1000 + i))
        paths.append(rig.path)
    return paths


def places(cleared: Cleared) -> tuple[list[Path], list[Path]]:
    """What was removed, and what was kept."""
    return [Path(space.where) for space in cleared.removed], [Path(space.where) for space in cleared.kept]


def test_spaces(tmp_path: Path) -> None:
    """Every space with its weights, its objects, its room on the disk and whether an engine has it; old ones first."""
    fill(tmp_path, "a")
    admin = admin_of(tmp_path)
    with Rig(tmp_path, space=space_of("b", rank=1)) as rig:
        rig.write(1)
        rig.commit()
        first, second = admin.spaces()
        assert (first.space.key_space, first.num_objects, first.is_open) == (space_of("a"), 4, False)
        assert (second.space.key_space, second.num_objects, second.is_open) == (space_of("b", rank=1), 1, True)
        assert first.num_bytes == 4 * 4096 <= (first.allocated_bytes or 0)
        assert first.last_written_seconds == 1000
        assert second.space.where == str(rig.path)
    assert not any(summary.is_open for summary in admin.spaces())


def test_folders_that_are_no_store(tmp_path: Path) -> None:
    """A folder that is not there, a file, and a folder of other things are refused; an empty one is an empty store."""
    (tmp_path / "empty").mkdir()
    admin = admin_of(tmp_path / "empty")
    assert admin.spaces() == admin.verify() == []
    assert admin.gc(0).removed == admin.clear("a").removed == ()
    (tmp_path / "file").write_text("")
    for name in ("missing", "file"):
        with pytest.raises(StorageRefusedError, match="there is no folder"):
            admin_of(tmp_path / name)
    with pytest.raises(StorageRefusedError, match="is no store"):
        admin_of(tmp_path)
    (tmp_path / "empty").rmdir()
    with pytest.raises(StorageError, match="No such file"):
        admin.spaces()


def test_foreign_things_beside_spaces(tmp_path: Path) -> None:
    """What is not the store's own is neither listed nor removed: links, copies, folders with the store's file names."""
    folder, outside = tmp_path / "store", tmp_path / "outside"
    (path,) = fill(folder, "a")
    (linked,) = fill(outside, "b")
    (folder / linked.name).symlink_to(linked)
    (folder / "copy").mkdir()
    (folder / "copy" / "space.json").write_bytes((path / "space.json").read_bytes())
    (folder / ("0" * 32)).mkdir()
    (folder / ("0" * 32) / "space.json").write_bytes((path / "space.json").read_bytes())
    for name in ("project", "1" * 32):
        (folder / name).mkdir()
        (folder / name / "space.json").write_text("{}")
    for file in (folder / "slab-00000", folder / "project" / "slab-00000", folder / "project" / "journal.new"):
        file.write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    admin = admin_of(folder)
    assert [summary.space.where for summary in admin.spaces()] == [str(path)]
    assert len(admin.verify()) == 1
    assert admin.clear("b").removed == ()
    assert places(admin.gc(0)) == ([path], [])
    assert sorted(tmp_path.rglob("*")) == [left for left in before if left != path and path not in left.parents]


def test_foreign_files_in_a_space(tmp_path: Path) -> None:
    """What is not called quite as the store's files are outlives the space, or is in its way; links lead nowhere."""
    a, b = fill(tmp_path / "store", "a", "b")
    admin = admin_of(tmp_path / "store")
    (a / "slab-00000").rename(tmp_path / "slab")
    (a / "slab-00000").symlink_to(tmp_path / "slab")
    (a / "notes").write_text("mine")
    assert places(admin.clear("a")) == ([a], [])
    assert list(a.iterdir()) == [a / "notes"] and (tmp_path / "slab").exists()
    for name in ("slab-notes", "notes.new"):
        (b / name).write_text("mine")
        for call in (lambda: admin.clear("b"), lambda: admin.gc(0)):
            with pytest.raises(StorageRefusedError, match=name):
                call()
        (b / name).unlink()
    assert admin.verify("b")[0].num_objects == 4


@contextmanager
def as_nobody() -> Iterator[None]:
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_no_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What may not be read is an error, and never an empty store."""
    (path,) = fill(tmp_path / "store", "a")
    monkeypatch.chdir(tmp_path)  # nobody may come this way
    admin = admin_of(Path("store"))
    for closed in (path.parent, path):
        path.parent.chmod(0o755)
        closed.chmod(0)
        with as_nobody():
            for call in (admin.spaces, admin.verify, lambda: admin.clear("a"), lambda: admin.gc(0)):
                with pytest.raises(StorageError, match="Permission denied"):
                    call()
    path.parent.chmod(0o700)
    path.chmod(0o700)
    assert admin.verify()[0].num_objects == 4


def test_verify(tmp_path: Path) -> None:
    """Damaged objects are counted, also beside an engine that has them open; sound ones are not."""
    fill(tmp_path, "a")
    with Rig(tmp_path, space=space_of("b")) as rig:
        rig.write(1, 2, 3)
        rig.commit()
        rig.spoil(2)
        found = {one.space.weights_id: (one.num_objects, one.num_damaged) for one in admin_of(tmp_path).verify()}
        assert found == {"a": (4, 0), "b": (3, 1)}
        assert [one.space.weights_id for one in admin_of(tmp_path).verify("a")] == ["a"]


def test_verify_without_a_slab(tmp_path: Path) -> None:
    """Objects whose slab is gone are damaged."""
    (path,) = fill(tmp_path, "a")
    (path / "slab-00000").unlink()
    assert admin_of(tmp_path).verify()[0].num_damaged == 4


def test_verify_of_more_slabs_than_descriptors(tmp_path: Path) -> None:
    """A large store is not damaged because its slabs cannot all be open at a time."""
    with Rig(tmp_path, num_slots=32, slots_per_slab=1) as rig:
        rig.write(*range(32))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(int(fd.name) for fd in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, limits[1]))
    try:
        (found,) = admin_of(tmp_path).verify()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (found.num_objects, found.num_damaged) == (32, 0)


def test_verify_beside_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is overwritten between the look at the journal and at its bytes is gone, and not damaged."""
    with Rig(tmp_path, num_slots=2) as rig:
        rig.write(1, 2)
        rig.commit()
        objects = SpaceCheck._objects

        def evict_after(*args: object) -> object:
            found = objects(*args)  # type: ignore[arg-type]
            monkeypatch.setattr(SpaceCheck, "_objects", objects)
            rig.write(3, 4)
            return found

        monkeypatch.setattr(SpaceCheck, "_objects", evict_after)
        (found,) = admin_of(tmp_path).verify()
        assert (found.num_objects, found.num_damaged, found.num_gone) == (2, 0, 2)


def test_verify_beside_one_who_writes_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that was half written when it was read, and is whole and in the journal when that is read again."""
    with Rig(tmp_path) as rig:
        rig.write(1)
        rig.commit()
        rig.spoil(1)
        mismatched = SpaceCheck._mismatched

        def mend_after(*args: object) -> object:
            found = mismatched(*args)  # type: ignore[arg-type]
            rig.read(1)  # finds the damage
            rig.write(1)
            rig.commit()
            return found

        monkeypatch.setattr(SpaceCheck, "_mismatched", mend_after)
        assert admin_of(tmp_path).verify()[0].num_damaged == 0


def test_clear(tmp_path: Path) -> None:
    """Spaces of these weights go, but not from under an engine: they are named."""
    a, b = fill(tmp_path, "a", "b")
    admin = admin_of(tmp_path)
    with Rig(tmp_path, space=space_of("a", rank=1), num_slots=100) as rig:
        rig.write(1)
        cleared = admin.clear("a")
        assert places(cleared) == ([a], [rig.path])
        assert (cleared.num_objects, cleared.freed_bytes) == (4, 16384)
        assert rig.read(1) == 1
    assert b.exists() and not a.exists()
    assert places(admin.clear("a")) == ([rig.path], [])


def test_clear_beside_another_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks whether a space is locked holds its lock for a moment: that is not taken for an engine."""
    (path,) = fill(tmp_path, "a")
    calls = []

    def busy_once(*args: object) -> bool:
        calls.append(args)
        return len(calls) > 1 and remove_space(*args)  # type: ignore[arg-type]

    remove_space = file_admin.remove_space
    monkeypatch.setattr(file_admin, "remove_space", busy_once)
    assert places(admin_of(tmp_path).clear("a")) == ([path], [])
    assert not path.exists()


def test_gc(tmp_path: Path) -> None:
    """The oldest go until the rest fits; those in use stay, and are named where it does not fit because of them."""
    a, b, c = fill(tmp_path, "a", "b", "c")
    admin = admin_of(tmp_path)
    with Rig(tmp_path, space=space_of("a"), num_slots=100) as rig:
        os.utime(rig.path / "journal", (1000, 1000))
        assert places(admin.gc(8 * 4096)) == ([b], [])
        assert rig.read(1, 2, 3, 4) == 4
        assert places(admin.gc(4 * 4096)) == ([c], [])
        assert places(admin.gc(0)) == ([], [a])
    assert places(admin.gc(0)) == ([a], [])
    assert list(tmp_path.iterdir()) == []


def test_gc_of_what_crashes_left(tmp_path: Path) -> None:
    """Slabs and temporary files of a space that has no name go, unless an engine is just making it."""
    (path,) = fill(tmp_path, "a")
    (path / "space.json").unlink()
    with Rig(tmp_path, space=space_of("b")) as rig:
        rig.write(1)
        (rig.path / "space.json").unlink()
        freed = admin_of(tmp_path).gc(10**9).freed_bytes
        assert freed == 16384 and not path.exists() and rig.path.exists()


@pytest.mark.parametrize("place", [3, -1])
def test_a_damaged_journal_is_no_whole_store(tmp_path: Path, place: int) -> None:
    """In its header or behind: what it named is lost, and `verify` says so; of a space in use it says nothing."""
    (path,) = fill(tmp_path, "a")
    assert [checked.is_listed for checked in admin_of(tmp_path).verify()] == [True]
    data = bytearray((path / "journal").read_bytes())
    data[place] ^= 1
    (path / "journal").write_bytes(data)
    (checked,) = admin_of(tmp_path).verify()
    assert not checked.is_listed and checked.num_objects == 0
    with Rig(tmp_path, space=space_of("a"), num_slots=100):
        assert admin_of(tmp_path).verify()[0].is_listed
