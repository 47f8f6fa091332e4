"""What killed processes of an engine leave in /dev/shm goes, and what anybody else has there stays."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.launch import shm_files
from fastdeploy_cache.launch.shm_files import SHM, engine_files_removed, is_held

_HAVE = {
    "opened": "f = open(sys.argv[1], 'rb')",
    "mapped": "f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); del f",
}
_PREFIX = f"psm_{os.getpid()}_"


@pytest.fixture(autouse=True)
def cleared() -> Iterator[None]:
    """None of the test's own files stays."""
    yield
    for path in SHM.glob(f"*{_PREFIX}*"):
        path.unlink()


def _new(name: str) -> Path:
    path = SHM / name
    path.write_bytes(bytes(4096))
    return path


def test_files_of_an_engine_that_came_during_the_block_go() -> None:
    """Also where the block fails. What was there before, and what has no engine's name, stays."""
    before = _new(f"{_PREFIX}before")
    with pytest.raises(RuntimeError, match="no engine"), engine_files_removed():
        left = [_new(f"{_PREFIX}left"), _new(f"vllm_dist_{_PREFIX}"), _new(f"sgl_{_PREFIX}"), _new(f"sem.mp-{_PREFIX}")]
        other = _new(f"other_{_PREFIX}")
        raise RuntimeError("no engine")
    assert not any(path.exists() for path in left)
    assert before.exists() and other.exists()


def test_files_of_another_user_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not ours to remove, even where we may."""
    monkeypatch.setattr(shm_files.os, "getuid", lambda: 12345)
    with engine_files_removed():
        left = _new(f"{_PREFIX}theirs")
    assert left.exists()


@pytest.mark.processes
@pytest.mark.parametrize("how", list(_HAVE))
def test_a_file_that_a_living_process_has_stays(how: str) -> None:
    """Whether it has it open or mapped; once it has ended the file is in nobody's hands."""
    code = f"import mmap, sys; {_HAVE[how]}; print('up', flush=True); input()"
    with engine_files_removed():
        file = _new(f"{_PREFIX}{how}")
        command = [sys.executable, "-c", code, str(file)]
        other = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None and other.stdout.readline() == "up\n"
    assert file.exists() and is_held(file.name)
    other.communicate("\n", timeout=30)
    assert not is_held(file.name)
