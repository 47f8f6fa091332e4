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
    "opened": "pass",
    "mapped": "m = mmap.mmap(f.fileno(), 0); f.close()",
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
    file = SHM / f"{_PREFIX}{how}"
    with engine_files_removed():
        other = _start(f"f = open({str(file)!r}, 'w+b'); f.truncate(4096); {_HAVE[how]}; print('up', flush=True)")
        assert _answer(other) == "up"
    assert file.exists() and is_held(file.name)
    _end(other)
    assert not is_held(file.name)


@pytest.mark.processes
def test_a_semaphore_of_a_living_process_stays() -> None:
    """Who makes one has it mapped under a name that is gone, and others will look for it by the one that is there."""
    code = "from multiprocessing import get_context; lock = get_context('spawn').Lock()"
    with engine_files_removed():
        other = _start(f"{code}; print(lock._semlock.name, flush=True)")
        file = SHM / f"sem.{_answer(other).lstrip('/')}"
    assert file.exists() and is_held(file.name)
    _end(other)


def _start(code: str) -> subprocess.Popen[str]:
    """A process that runs this, and then waits for a line."""
    command = [sys.executable, "-c", f"import mmap; {code}; input()"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def _end(process: subprocess.Popen[str]) -> None:
    process.communicate("\n", timeout=30)
