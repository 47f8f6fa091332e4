"""What an operator sees and does in a folder of file stores."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transfer_manager.storage.file_rig import Rig, space_of
from transfer_manager.storage import file_admin
from transfer_manager.storage.file_admin import gc, list_spaces, remove_spaces, verify


def fill(folder: Path, *weights_ids: str) -> list[Path]:
    """A closed space of four objects each, older ones first."""
    paths = []
    for i, weights_id in enumerate(weights_ids):
        with Rig(folder, space=space_of(weights_id), num_slots=100) as rig:
            rig.write(1, 2, 3, 4)
        os.utime(rig.path / "journal", (1000 + i, 1000 + i))
        paths.append(rig.path)
    return paths


def test_list_spaces(tmp_path: Path) -> None:
    """Every space with its weights, its objects, its room on the disk and whether an engine has it."""
    fill(tmp_path, "a")
    with Rig(tmp_path, space=space_of("b", rank=1)) as rig:
        rig.write(1)
        rig.commit()
        first, second = list_spaces(tmp_path)
        assert (first.space, first.num_objects, first.is_locked) == (space_of("a"), 4, False)
        assert (second.space, second.num_objects, second.is_locked) == (space_of("b", rank=1), 1, True)
        assert first.num_bytes == 4 * 4096 <= first.allocated_bytes
        assert second.path == rig.path
    assert not any(info.is_locked for info in list_spaces(tmp_path))


def test_an_empty_or_foreign_folder(tmp_path: Path) -> None:
    """What is not a space is left alone; a folder that is not there is empty."""
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "space.json").write_text("{}")
    assert list_spaces(tmp_path) == verify(tmp_path) == gc(tmp_path, 0) == []
    assert list_spaces(tmp_path / "missing") == gc(tmp_path / "missing", 0) == []


def test_verify(tmp_path: Path) -> None:
    """Damaged objects are counted, also beside an engine that has them open; sound ones are not."""
    fill(tmp_path, "a")
    with Rig(tmp_path, space=space_of("b")) as rig:
        rig.write(1, 2, 3)
        rig.commit()
        rig.spoil(2)
        found = {item.space.weights_id: (item.num_checked, item.num_damaged) for item in verify(tmp_path)}
        assert found == {"a": (4, 0), "b": (3, 1)}
        assert [item.space.weights_id for item in verify(tmp_path, "a")] == ["a"]


def test_verify_without_a_slab(tmp_path: Path) -> None:
    """Objects whose slab is gone are damaged."""
    (path,) = fill(tmp_path, "a")
    (path / "slab-00000").unlink()
    assert verify(tmp_path)[0].num_damaged == 4


def test_verify_beside_a_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object that is overwritten between the look at the journal and at its bytes is not damaged."""
    with Rig(tmp_path, num_slots=2) as rig:
        rig.write(1, 2)
        rig.commit()
        objects = file_admin._objects

        def evict_after(*args: object) -> object:
            found = objects(*args)
            monkeypatch.setattr(file_admin, "_objects", objects)
            rig.write(3, 4)
            return found

        monkeypatch.setattr(file_admin, "_objects", evict_after)
        (found,) = verify(tmp_path)
        assert (found.num_checked, found.num_damaged) == (2, 0)


def test_verify_beside_one_who_writes_the_same_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is one that was half written when it was read, and is whole and in the journal when that is read again."""
    with Rig(tmp_path) as rig:
        rig.write(1)
        rig.commit()
        rig.spoil(1)
        mismatched = file_admin._mismatched

        def mend_after(*args: object) -> object:
            found = mismatched(*args)
            rig.read(1)  # finds the damage
            rig.write(1)
            rig.commit()
            return found

        monkeypatch.setattr(file_admin, "_mismatched", mend_after)
        assert verify(tmp_path)[0].num_damaged == 0


def test_remove_spaces(tmp_path: Path) -> None:
    """Spaces of these weights go, but not from under an engine."""
    a, b = fill(tmp_path, "a", "b")
    with Rig(tmp_path, space=space_of("a", rank=1), num_slots=100) as rig:
        rig.write(1)
        assert [info.path for info in remove_spaces(tmp_path, "a")] == [a]
        assert rig.read(1) == 1
    assert b.exists() and not a.exists()
    assert [info.path for info in remove_spaces(tmp_path, "a")] == [rig.path]


def test_gc(tmp_path: Path) -> None:
    """The oldest go until the rest fits, with what crashes left; those in use stay."""
    a, b, c = fill(tmp_path, "a", "b", "c")
    (c / "journal.new").write_bytes(b"half")
    with Rig(tmp_path, space=space_of("a"), num_slots=100) as rig:
        os.utime(rig.path / "journal", (1000, 1000))
        assert [info.path for info in gc(tmp_path, 8 * 4096)] == [b]
        assert rig.read(1, 2, 3, 4) == 4
    assert a.exists() and c.exists() and not (c / "journal.new").exists()
    assert len(gc(tmp_path, 0)) == 2
    assert list(tmp_path.iterdir()) == []
