"""Whether a folder can be a store's: tried before anything is started for it."""

from __future__ import annotations

import errno
import os
import re
import threading
from pathlib import Path

import pytest

from fastdeploy_cache.errors import StorageRefusedError
from fastdeploy_cache.transfer_manager.storage import file_place, file_space
from fastdeploy_cache.transfer_manager.storage.config import StorageConfig
from fastdeploy_cache.transfer_manager.storage.file_disk import FOR_THE_USER, Disk, mode_at
from fastdeploy_cache.transfer_manager.storage.file_place import check_place
from tests.rigs.file_rig import Rig


def storage_at(folder: Path, **settings: float) -> StorageConfig:
    return StorageConfig(weights_id="w1", folder=str(folder), **settings)  # type: ignore[arg-type]


def test_a_folder_that_can_be_made(tmp_path: Path) -> None:
    """It is made, with mode 700, and nothing is in it; one that is there stays as it is. Other stores have none."""
    folder = tmp_path / "new" / "store"
    for _ in range(2):
        check_place(storage_at(folder))
        assert folder.stat().st_mode & 0o777 == 0o700 and not list(folder.iterdir())
    check_place(None)
    check_place(StorageConfig(kind="valkey", weights_id="w1"))
    with Rig(folder) as rig:
        rig.write(1)
        check_place(storage_at(folder))
        assert rig.read(1) == 1


@pytest.mark.parametrize(
    "place",
    ["file", "file/below", "dangling", "dangling/below", "loop", "loop/store", "/proc/none/store", "n" * 300, "open"],
)
def test_a_folder_that_cannot_be_used(tmp_path: Path, place: str) -> None:
    """The message has the setting, its value and what is wrong with it."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(
        StorageRefusedError, match=r"^storage\.folder is '.*', which cannot be used: .*; .*name a folder"
    ) as refused:
        check_place(storage_at(tmp_path / place))
    words = {
        "file": "it is a file; ",
        "file/below": f"'{tmp_path / 'file'}' is a file; ",
        "dangling": "it is a link that",
        "dangling/below": f"'{tmp_path / 'dangling'}' is a link that",
        "loop": "it is a link that",
    }
    assert f"cannot be used: {words.get(place, '')}" in str(refused.value)
    assert str(refused.value).count(f"{tmp_path / place}") == 1 or place in ("loop/store", "n" * 300)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_of_something_else(tmp_path: Path) -> None:
    """It is refused, by the engine and by the store itself, with an example of what is in it; nothing is put there."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "accounts.txt").write_text("mine")
    with pytest.raises(
        StorageRefusedError, match=r"such as 'accounts\.txt', is not a store's; name a folder that is e"
    ):
        check_place(storage_at(tmp_path))
    with pytest.raises(StorageRefusedError, match=r"could not open .*: it is not empty, and what is in it, such as"):
        Rig(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["accounts.txt", "notes"]


def test_a_folder_that_only_looks_foreign(tmp_path: Path) -> None:
    """What a new disk has is nobody's, and one in which the store has ever had a space is the store's."""
    (tmp_path / "lost+found").mkdir()
    (tmp_path / ".snapshot").mkdir()
    check_place(storage_at(tmp_path))
    with Rig(tmp_path) as rig:
        rig.write(1)
    (tmp_path / "README").write_text("what is here is a cache")
    check_place(storage_at(tmp_path))
    with Rig(tmp_path) as rig:
        assert rig.read(1) == 1


def test_a_disk_that_cannot_be_read_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A store in a folder whose disk fails for a moment may be opened again: it is not taken for a file, which would
    refuse it for good. Since Python 3.14 `Path` says in so many words that what it cannot look at is no folder."""

    (folder := tmp_path / "store").mkdir()
    look = Path.stat

    def fail(path: Path, **how: bool) -> os.stat_result:
        if path == folder:
            raise OSError(errno.EIO, "Input/output error")
        return look(path, **how)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", fail)
        for question in ("exists", "is_dir", "is_file", "is_symlink"):
            patched.setattr(Path, question, lambda _: False)
        with pytest.raises(OSError, match="Input/output error") as failed:
            Disk().make_folder(folder)
    assert failed.value.errno not in FOR_THE_USER
    Disk().make_folder(folder)


def test_a_space_that_cannot_be_looked_into_keeps_nobody_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is another user's, and comes first of those in the folder: ours is opened all the same."""
    (foreign := tmp_path / ("0" * 32)).mkdir()

    def look(path: Path, **how: bool) -> int | None:
        if path.parent == foreign:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return mode_at(path, **how)

    monkeypatch.setattr(file_space, "mode_at", look)
    with Rig(tmp_path) as rig:
        rig.write(1)
        assert rig.read(1) == 1


def test_nothing_asks_a_path_that_hides_errors() -> None:
    """What is not there is told from a disk that cannot be read, wherever the store looks at its folder."""
    hiding = re.compile(r"\.(exists|is_dir|is_file|r?glob)\(|exist_ok|os\.path\.")
    sources = sorted(Path(file_place.__file__).parent.glob("*.py"))
    lines = [(path.name, line) for path in sources for line in path.read_text().splitlines() if hiding.search(line)]
    assert len(sources) > 10 and [line for _, line in lines if not line.strip().startswith("`")] == []


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.EPERM])
@pytest.mark.parametrize("call", ["make_folder", "check_folder"])
def test_what_this_user_may_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int) -> None:
    """A read-only mount, and folders of others: root, which tests may run as, is stopped by neither."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "the folder")

    monkeypatch.setattr(Disk, call, fail)
    with pytest.raises(StorageRefusedError, match=os.strerror(number)):
        check_place(storage_at(tmp_path))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.ESTALE, errno.EMFILE])
def test_what_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """A full or a broken disk is the storage process's to try again: what is there can be read."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(file_place.tempfile, "TemporaryFile", fail)
    check_place(storage_at(tmp_path))


def test_a_mount_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds the engine up for `start_timeout_seconds` and no longer."""
    answers = threading.Event()
    monkeypatch.setattr(Disk, "make_folder", lambda *_: answers.wait(30))
    check_place(storage_at(tmp_path, start_timeout_seconds=0.05))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "kv-file-place"]
    answers.set()
    thread.join(30)
    assert not thread.is_alive()
