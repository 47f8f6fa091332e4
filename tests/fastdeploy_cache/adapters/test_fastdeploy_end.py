"""The end of FastDeploy's engine, which never closes its cache manager: what of it is left."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.rigs.fastdeploy_engine import SUFFIX

pytestmark = pytest.mark.processes

FOLDER = Path("/dev/shm")
_ENGINE = """
import os, signal, sys
from multiprocessing import shared_memory
from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from tests.rigs.fastdeploy_engine import launch, new_config
suffix = sys.argv[1]
names = ["cache_ready_signal", "swap_space_ready_signal", "cache_transfer_inited_signal", "prefix_tree_status"]
sizes = [8, 8, 8, 4]
own = [shared_memory.SharedMemory(f"{name}.{suffix}", True, size) for name, size in zip(names, sizes)]
manager = PrefixCacheManager(new_config(8, 8), 2)
processes = launch(manager, suffix, 2)
print(*[p.pid for p in processes], flush=True)
while (asked := sys.stdin.readline().strip()) == "exit sub services":
    manager.shm_cache_task_flag_broadcast.clear()
    manager.cache_ready_signal.clear()
    for process in processes:
        os.killpg(os.getpgid(process.pid), signal.SIGTERM)
    print("still here", flush=True)
for memory in own:
    if os.path.exists(f"/dev/shm/{memory.name}"):
        memory.unlink()
"""


@contextmanager
def engine(suffix: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """A process like FastDeploy's engine, in a session of its own, and descriptors of its ranks."""
    with ExitStack() as stack:
        command = [sys.executable, "-c", _ENGINE, suffix]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        process = subprocess.Popen(command, text=True, cwd=Path.cwd(), start_new_session=True, **pipes)
        stack.callback(process.wait, 30)
        stack.callback(process.kill)
        assert process.stdout is not None and process.stdin is not None
        stack.callback(process.stdout.close)
        stack.callback(process.stdin.close)
        ranks = [os.pidfd_open(int(pid)) for pid in process.stdout.readline().split()]
        for rank in ranks:
            stack.callback(os.close, rank)
        yield process, ranks


def has_ended(rank: int) -> bool:
    """Within ten seconds."""
    poll = select.poll()
    poll.register(rank, select.POLLIN)
    return bool(poll.poll(10_000))


def test_an_engine_that_ends_without_close_leaves_nothing() -> None:
    """At the end of its process the names that the manager has made are gone, and so are the ranks."""
    with engine(f"gone{SUFFIX}") as (process, ranks):
        assert len(ranks) == 2 and len(list(FOLDER.glob(f"*.gone{SUFFIX}"))) == 7
        assert process.communicate("\n", timeout=30)[0] == "" and process.returncode == 0
        assert not list(FOLDER.glob(f"*.gone{SUFFIX}"))
        assert all(has_ended(rank) for rank in ranks)


def test_the_engines_exit_code_ends_the_ranks_and_not_the_engine() -> None:
    """It clears two signals and sends SIGTERM to the group of each process that the launch returned: the ranks get it,
    the engine does not; after its end no process and no name is left."""
    with engine(f"end{SUFFIX}") as (process, ranks):
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("exit sub services\n")
        process.stdin.flush()
        assert process.stdout.readline() == "still here\n", "the engine was in a rank's group"
        assert all(has_ended(rank) for rank in ranks)
        assert process.communicate("\n", timeout=30)[0] == "" and process.returncode == 0
        assert not list(FOLDER.glob(f"*.end{SUFFIX}"))
