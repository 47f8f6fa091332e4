"""Fixtures for all tests: nothing may be left behind."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator

import pytest

from tests.rigs.leaks import child_pids, handles, shm_files


@pytest.fixture(autouse=True)
def no_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a test that leaves processes, descriptors or /dev/shm files; `leaks_allowed` names the exceptions."""
    if "leaks_allowed" in request.keywords:
        yield
        return
    before = child_pids(), handles(), shm_files()
    yield
    deadline = time.monotonic() + 3
    while True:
        left = (
            child_pids() - before[0],
            {fd: name for fd, name in handles().items() if before[1].get(fd) != name},
            shm_files() - before[2],
        )
        if not any(left) or time.monotonic() > deadline:
            break
        gc.collect()  # not before: it takes longer than most tests
        time.sleep(0.05)  # a closed socket's descriptor goes in another thread
    assert not any(left), f"left behind: processes {left[0]}, handles {left[1]}, /dev/shm {left[2]}"
