"""A folder for sockets: for its owner alone, short enough for their names, and swept when its owner was killed."""

from __future__ import annotations

import errno
import os
import socket
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from fastdeploy_cache.ipc.private_directory import PrivateDirectory, temporary_folder
from tests.rigs.descriptors import descriptors_left


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    """Closes what a test opened."""
    with ExitStack() as stack:
        yield stack


def new_folder(opened: ExitStack) -> Path:
    folder = PrivateDirectory()
    opened.callback(folder.remove)
    return folder.path


def test_it_is_private(opened: ExitStack) -> None:
    """No other user can reach what is in it: it has mode 0700 and is ours."""
    info = new_folder(opened).stat()
    assert stat.S_IMODE(info.st_mode) == 0o700 and info.st_uid == os.getuid()


def test_it_goes_with_what_is_in_it() -> None:
    """Nothing is left; a second time is fine."""
    folder = PrivateDirectory()
    (folder.path / "queue").touch()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


@pytest.mark.parametrize("name", ["x" * 90, "é" * 60])
def test_a_long_temporary_folder_works(name: str, opened: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    """Socket addresses hold 108 bytes; a longer TMPDIR (in bytes, not letters) does not stop a socket."""
    folder = Path(tempfile.mkdtemp(dir="/tmp", prefix="t")) / name
    folder.mkdir()
    opened.callback(folder.parent.rmdir)
    opened.callback(folder.rmdir)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(new_folder(opened) / "queue"))


def test_a_shortage_is_no_missing_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no temporary folder can be tried for want of descriptors, the system's own error says that."""
    monkeypatch.setattr(tempfile, "tempdir", None)
    with descriptors_left(0), pytest.raises(OSError) as caught:
        PrivateDirectory()
    assert caught.value.errno == errno.EMFILE
    assert temporary_folder() == tempfile.gettempdir()


def test_what_a_killed_process_left_goes_with_the_next_start(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However young: a folder that nobody locks is a dead process's. Locked and foreign ones stay."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    in_use = new_folder(opened)
    for name in ("fdc-left", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "queue").touch()
    second = new_folder(opened)
    assert {path.name for path in tmp_path.iterdir()} == {in_use.name, second.name, "other"}


def test_one_that_is_swept_before_it_is_locked_is_made_anew(
    opened: ExitStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process starts just between, and takes the folder for a dead one's: its owner notices."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    make, made = tempfile.mkdtemp, list[str]()

    def make_and_lose_the_first(**where: str) -> str:
        path = make(**where)
        made.append(path)
        if len(made) == 1:
            Path(path).rmdir()
        return path

    monkeypatch.setattr(tempfile, "mkdtemp", make_and_lose_the_first)
    folder = new_folder(opened)
    assert str(folder) == made[1] and [path.name for path in tmp_path.iterdir()] == [folder.name]
