"""Whose files the file store touches: its user's own, in folders that nobody else can write to, and through no link."""

from __future__ import annotations

import ast
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeGuard

import pytest

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import file_disk
from fastdeploy_cache.transfer_manager.storage.file_admin import FileAdmin
from tests.rigs.file_rig import Rig, space_of
from tests.rigs.leaks import num_descriptors

FILES = ("space.json", "journal", "lock", "slab-00000")
STRANGER = 65534
PRECIOUS = os.urandom(500_000)


def is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


def filled(folder: Path, weights_id: str = "llama@1") -> Path:
    """A closed space; its folder."""
    with Rig(folder, space=space_of(weights_id)) as rig:
        rig.write(1, 2, 3, 4)
    return rig.path


def commands(folder: Path) -> list[Callable[[], object]]:
    """Everything that opens a store's files: an engine, and an operator."""

    def admin() -> FileAdmin:
        return FileAdmin({"folder": str(folder)})

    return [
        lambda: Rig(folder),
        lambda: admin().spaces(),
        lambda: admin().verify(),
        lambda: admin().clear("llama@1"),
        lambda: admin().gc(0),
    ]


def refused_by_all(folder: Path, words: str) -> None:
    """Every one of them says so, changes nothing and leaves nothing open."""
    before, num_open = sorted(folder.rglob("*")), num_descriptors()
    for command in commands(folder):
        with pytest.raises(StorageRefusedError, match=words):
            command()
    assert (sorted(folder.rglob("*")), num_descriptors()) == (before, num_open)


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither an engine nor an operator works in it; the message says whose it is."""
    filled(tmp_path)
    owner = os.geteuid()
    monkeypatch.setattr(file_disk.os, "geteuid", lambda: owner + 1)
    refused_by_all(tmp_path, f"is of user {owner}, and this is user {owner + 1}")


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
@pytest.mark.parametrize("which", ["store", "space"])
def test_a_folder_that_others_can_write_to(tmp_path: Path, which: str, mode: int) -> None:
    """They could put links there, also while it is in use. One for everybody, as /tmp, is not to be closed to them."""
    path = filled(tmp_path / "store")
    remedy = (
        "name a folder of your own, such as a new one in it" if mode & 0o1000 else "chmod go-w it, or name a folder"
    )
    words = f"others can write to the folder, its mode is {mode:o}; {remedy}"
    (path if which == "space" else path.parent).chmod(mode)
    if which == "store":
        refused_by_all(path.parent, words)
        return
    with pytest.raises(StorageRefusedError, match=words):
        Rig(path.parent)
    before, admin = sorted(path.iterdir()), FileAdmin({"folder": str(path.parent)})
    assert admin.spaces() == admin.verify(remove=True) == []
    assert admin.clear("llama@1").removed == admin.gc(0).removed == ()
    assert sorted(path.iterdir()) == before and words in admin.unreadable()[0]


def test_a_folder_that_others_may_read(tmp_path: Path) -> None:
    """As one is that somebody has made with mkdir: what is in it they cannot read all the same."""
    (tmp_path / "store").mkdir(mode=0o755)
    path = filled(tmp_path / "store")
    assert [file.stat().st_mode & 0o077 for file in (path, *path.iterdir())] == [0] * 5


def test_a_link_to_the_store(tmp_path: Path) -> None:
    """The folder that the user names may be a link: where it leads to is what is checked."""
    filled(tmp_path / "store")
    (tmp_path / "link").symlink_to(tmp_path / "store")
    with Rig(tmp_path / "link") as rig:
        assert rig.read(1, 2, 3, 4) == 4
    assert len(FileAdmin({"folder": str(tmp_path / "link")}).spaces()) == 1
    (tmp_path / "store").chmod(0o777)
    with pytest.raises(StorageRefusedError, match="others can write"):
        Rig(tmp_path / "link")


@pytest.mark.parametrize("name", FILES)
def test_a_link_in_place_of_a_file(tmp_path: Path, name: str) -> None:
    """What it leads to is neither read nor cut nor locked, by nobody; an engine and `ls` say which it is."""
    path, precious = filled(tmp_path / "store"), tmp_path / "precious"
    precious.write_bytes(PRECIOUS)
    (path / name).unlink()
    (path / name).symlink_to(precious)
    num_open = num_descriptors()
    with pytest.raises(StorageRefusedError, match=f"it is a link, and the store follows none.*{name}"):
        Rig(tmp_path / "store")
    for command in commands(tmp_path / "store"):
        with suppress(StorageRefusedError):
            command()
    assert precious.read_bytes() == PRECIOUS
    assert num_descriptors() == num_open


def test_a_link_in_place_of_a_space(tmp_path: Path) -> None:
    """An engine refuses it, and an operator's commands do not see it."""
    path = filled(tmp_path / "store")
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(StorageRefusedError, match="is a link"):
        Rig(tmp_path / "store")
    (tmp_path / "store" / ("0" * 32)).mkdir()
    admin = FileAdmin({"folder": str(tmp_path / "store")})
    assert admin.spaces() == admin.verify() == []
    assert admin.gc(0).removed == admin.clear("llama@1").removed == ()
    assert sorted(tmp_path.rglob("*")) == sorted([*before, tmp_path / "store" / ("0" * 32)])


def test_a_link_where_a_slab_will_be(tmp_path: Path) -> None:
    """A store that grows makes its own file or none; it goes on within what it has."""
    precious = tmp_path / "precious"
    precious.write_bytes(PRECIOUS)
    with Rig(tmp_path / "store", num_slots=8, slots_per_slab=4) as rig:
        rig.write(1, 2, 3, 4)
        (rig.path / "slab-00001").symlink_to(precious)
        assert rig.write(5, 6)[0] == 2
        assert rig.read(5, 6) == 2
    assert precious.read_bytes() == PRECIOUS


def test_links_in_another_space_are_no_matter_of_an_engine(tmp_path: Path) -> None:
    """It starts, and makes room without them; what they lead to is left alone."""
    precious = tmp_path / "precious"
    precious.write_bytes(PRECIOUS)
    for name in FILES:
        other = filled(tmp_path / name, "other@1")
        (other / name).unlink()
        (other / name).symlink_to(precious)
        with Rig(tmp_path / name, num_slots=8) as rig:
            assert rig.write(*range(8))[0] > 0
    assert precious.read_bytes() == PRECIOUS


@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file(tmp_path: Path, name: str) -> None:
    """A pipe holds nobody up, and a folder is refused like it."""
    path = filled(tmp_path / "store")
    (path / name).unlink()
    os.mkfifo(path / name)
    with pytest.raises(StorageRefusedError, match=f"it is a pipe or device, and no file; move it away.*{name}"):
        Rig(tmp_path / "store")
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(StorageRefusedError, match=name):
        Rig(tmp_path / "store")


@pytest.mark.parametrize("kind", ["pipe", "folder"])
@pytest.mark.parametrize("name", FILES)
def test_what_is_no_file_stops_no_other_space(tmp_path: Path, name: str, kind: str) -> None:
    """An operator's commands name it, leave a folder and what is beside it, and go on with the rest of the store."""
    path, other = filled(tmp_path / "store"), filled(tmp_path / "store", "other@1")
    (path / name).unlink()
    if kind == "pipe":
        os.mkfifo(path / name)
    else:
        (path / name).mkdir()
    before, admin = sorted(path.iterdir()), FileAdmin({"folder": str(tmp_path / "store")})
    words = "it is a pipe or device, and no file" if kind == "pipe" else "it is a folder, and no file"
    assert [f"{path / name}: {words}; move it away"] == admin.unreadable()
    assert [checked.num_objects for checked in admin.verify(remove=True)] == [4]
    assert "other@1" in [summary.space.weights_id for summary in admin.spaces()]
    admin.clear("llama@1")
    assert sorted(path.iterdir()) == before if kind == "folder" or name != "slab-00000" else not path.exists()
    assert other in [Path(space.where) for space in admin.gc(0).removed] and not other.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_user(tmp_path: Path, name: str) -> None:
    """It is not taken for the store's, whatever its name; an operator's commands refuse it, or leave it as it is."""
    path = filled(tmp_path / "store")
    data = (path / name).read_bytes()
    os.chown(path / name, STRANGER, STRANGER)
    for command in commands(tmp_path / "store")[:3]:
        with suppress(StorageRefusedError):
            command()
    with pytest.raises(StorageRefusedError, match=f"but of user {STRANGER}.*{name}"):
        Rig(tmp_path / "store")
    assert (path / name).read_bytes() == data


def test_every_file_is_opened_in_one_place() -> None:
    """Nothing of the file store opens, reads or writes a path but by its `Disk`, which checks whose it is."""
    by_path = {"open", "read_bytes", "read_text", "write_bytes", "write_text", "mkdir", "truncate"}
    by_disk = {"disk.open", "self._disk.open", "self._slabs.open", "self._disk.truncate"}
    for module in sorted(Path(file_disk.__file__).parent.glob("file_*.py")):
        if module.name != "file_disk.py":
            called = [ast.unparse(node.func) for node in ast.walk(ast.parse(module.read_text())) if is_call(node)]
            assert not [name for name in called if name.rpartition(".")[2] in by_path and name not in by_disk], module


def test_blocks_of_other_weights_are_counted_when_it_is_opened(tmp_path: Path) -> None:
    """Those that are alike in all else, and have something: not another rank's, nor those of blocks of another size."""
    others = (space_of("b"), space_of("c"), space_of("d", rank=1), space_of("e", object_bytes=8192))
    for space in others:
        with Rig(tmp_path, space=space, num_slots=64) as rig:
            rig.write(1)
    with Rig(tmp_path, space=space_of("empty"), num_slots=64):
        pass
    with Rig(tmp_path, space=space_of("a"), num_slots=64) as rig:
        assert rig.store.stats().num_other_weights == 2
