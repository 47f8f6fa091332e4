"""Files that killed ranks leave in /dev/shm are found, and those of other living programs are not taken for them."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.errors import LaunchError
from fastdeploy_cache.launch.gpu import kills
from fastdeploy_cache.launch.shm_files import shm_names

_HOLD = "import mmap, sys; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); print('up', flush=True); input()"


@pytest.fixture(autouse=True)
def no_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second look comes at once."""
    monkeypatch.setattr(kills, "_SECOND_LOOK_SECONDS", 0.0)


@pytest.fixture
def file() -> Iterator[Path]:
    """A new file there, which nobody has mapped."""
    path = Path(f"/dev/shm/left-{os.getpid()}-behind")
    path.write_bytes(bytes(mmap.PAGESIZE))
    yield path
    path.unlink()


def test_a_file_that_nobody_has_is_left_behind(file: Path) -> None:
    """It was not there before: its name is in the error. What was there before is passed over."""
    with pytest.raises(LaunchError, match=file.name):
        kills._expect_no_files(shm_names() - {file.name})
    assert "nothing is left" in kills._expect_no_files(shm_names())


def test_a_file_that_goes_by_itself_is_not_left_behind(monkeypatch: pytest.MonkeyPatch, file: Path) -> None:
    """At the second look it is not there any more: some other program has made it and removed it."""
    names = shm_names()
    looks = iter([names, names - {file.name}, names - {file.name}])
    monkeypatch.setattr(kills, "shm_names", lambda: next(looks))
    assert "nothing is left" in kills._expect_no_files(names - {file.name})


@pytest.mark.processes
def test_a_file_of_another_program_is_not_ours(file: Path) -> None:
    """Another process has it mapped: as long as it lives the file is its own."""
    before = shm_names() - {file.name}
    command = [sys.executable, "-c", _HOLD, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "up\n"
        assert file.name in kills._expect_no_files(before)
        other.communicate("\n", timeout=30)
    with pytest.raises(LaunchError, match=file.name):
        kills._expect_no_files(before)
