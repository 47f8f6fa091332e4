"""The words that FastDeploy's engine makes before its cache manager: attached, answered, left; and its end."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.errors import IPCError
from tests.rigs.fastdeploy_engine import (
    PROMPT,
    SUFFIX,
    Kernel,
    Task,
    launch,
    new_config,
    serve_v1,
    with_cpu,
)

FOLDER = Path("/dev/shm")
BY_RANK = ("cache_ready_signal", "swap_space_ready_signal", "cache_transfer_inited_signal")
ENGINE_MAKES = (*BY_RANK, "prefix_tree_status")  # the manager makes the rest
ATTRIBUTES = {
    "shm_cache_task_flag_broadcast": "cache_task_broadcast_signal",
    "cache_task_is_paused_signal": "cache_task_is_paused",
    "cache_task_inflight_signal": "cache_task_inflight",
    "cache_ready_signal": "cache_ready_signal",
    "swap_space_ready_signal": "swap_space_ready_signal",
    "cache_transfer_inited_signal": "cache_transfer_inited_signal",
    "prefix_tree_status_signal": "prefix_tree_status",
}


@contextmanager
def engine_words(suffix: str, tp_size: int = 1) -> Iterator[dict[str, Any]]:
    """The engine's own words by name, made as its IPCSignal makes them: plain files, mode 0600, and no lock."""
    paths = {name: FOLDER / f"{name}.{suffix}" for name in ENGINE_MAKES}
    words: dict[str, Any] = {}
    for name, path in paths.items():
        path.write_bytes(bytes(4 * (tp_size if name in BY_RANK else 1)))
        path.chmod(0o600)
        words[name] = np.memmap(path, np.int32, "r+")
    try:
        yield words
    finally:
        for path in paths.values():
            path.unlink(missing_ok=True)


def wait_tree_status(manager: PrefixCacheManager, seen: int) -> int:
    """What comes after `seen`."""
    assert manager.parts.launcher._words is not None
    return manager.parts.launcher._words._words["prefix_tree_status"].wait_change(0, seen, 10)


def test_the_engine_sees_in_its_own_words_that_all_is_ready() -> None:
    """Made before the launch they are attached: ready appears in them, CLEARING and UPDATING are answered in them, and
    at the end they are there, and say that nothing is ready any more."""
    with engine_words(SUFFIX, 2) as words:
        inodes = {name: (FOLDER / f"{name}.{SUFFIX}").stat().st_ino for name in words}
        manager = with_cpu(16, 16, tp_size=2, transfer_client="inline")
        assert all(words[name].tolist() == [1, 1] for name in BY_RANK)
        for asked, answer in ((-1, -2), (1, 0)):
            serve_v1(manager, Task("a", PROMPT), [1], Kernel(manager))
            words["prefix_tree_status"][0] = asked
            assert wait_tree_status(manager, asked) == answer == words["prefix_tree_status"][0]
            assert manager.node_map == {}
        manager.close()
        assert {name: (FOLDER / f"{name}.{SUFFIX}").stat().st_ino for name in words} == inodes, "replaced or removed"
        assert not any(words[name].any() for name in words)
        assert {path.name for path in FOLDER.glob(f"*.{SUFFIX}")} == {f"{name}.{SUFFIX}" for name in words}


def test_a_worker_that_asked_before_the_launch_is_answered() -> None:
    """What a word says when it is attached is not overwritten."""
    with engine_words(SUFFIX) as words:
        words["prefix_tree_status"][0] = -1
        manager = with_cpu(8, 0, transfer_client="inline")
        assert wait_tree_status(manager, -1) == -2
        manager.close()


def test_a_second_manager_is_refused_although_the_words_are_the_engines() -> None:
    """What the first one has made itself says that it lives; nothing of it changes, and after its end there is room."""
    with engine_words(SUFFIX) as words:
        first = with_cpu(8, 0, transfer_client="inline")
        with pytest.raises(IPCError, match="in use by a running process"):
            with_cpu(8, 0, transfer_client="inline")
        assert words["cache_ready_signal"][0] == 1
        first.close()
        with_cpu(8, 0, transfer_client="inline").close()


@pytest.mark.processes
def test_a_fork_that_ends_first_takes_no_word_along() -> None:
    """A child without `exec` that runs to its end closes nothing of its parent's: names and locks are as before."""
    script = """
import os, sys
from fastdeploy_cache.errors import IPCError
from fastdeploy_cache.ipc.named_signal import NamedSignal
from fastdeploy_cache.transfer_manager.rank.worker_signals import WorkerSignals
signals = WorkerSignals(sys.argv[1], 1, on_asked=lambda asked: True, state=lambda: (False, 0))
if not (child := os.fork()):
    sys.exit()
os.waitpid(child, 0)
try:
    NamedSignal.create("cache_task_inflight", sys.argv[1], 1)
except IPCError as error:
    print("in use by a running process" in str(error))
"""
    command = [sys.executable, "-c", script, f"{SUFFIX}fork"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout == "True\n"
    assert not list(FOLDER.glob(f"*.{SUFFIX}fork"))


def test_the_suffix_is_the_engine_worker_queue_port() -> None:
    """The names end with that port, whatever `ipc_suffix` is."""
    manager, port = PrefixCacheManager(new_config(8, transfer_client="inline"), 1), os.getpid()
    launch(manager, port)
    names = {f"{name}.{port}" for name in ATTRIBUTES.values()}
    assert {path.name for path in FOLDER.glob(f"*.{port}")} == names
    manager.close()


def test_the_signals_are_attributes_with_value_and_clear() -> None:
    """Before the launch they are there and say nothing; after it they are the words; `clear` removes a name once, also
    one that the engine has made, and the manager goes on without it."""
    manager = PrefixCacheManager(new_config(8, transfer_client="inline"), 2)
    for attribute in ATTRIBUTES:
        getattr(manager, attribute).clear()
        assert not getattr(manager, attribute).value.any()
    with engine_words(SUFFIX, 2) as words:
        launch(manager, SUFFIX, 2)
        manager.prefix_tree_status_signal.value[0] = 5
        assert words["prefix_tree_status"][0] == 5
        for attribute, name in ATTRIBUTES.items():
            path, shown = FOLDER / f"{name}.{SUFFIX}", getattr(manager, attribute)
            assert len(shown.value) == path.stat().st_size // 4
            shown.clear()
            shown.clear()
            assert not path.exists()
        assert manager.control("pause") == (200, "paused")
        assert manager.cache_task_is_paused_signal.value[0] == 1
        manager.control("resume")
        manager.close()
