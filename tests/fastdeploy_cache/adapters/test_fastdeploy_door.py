"""The door for FastDeploy's users: its entry point run with our cache manager in the place of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastdeploy_cache.adapters.fastdeploy import hook
from fastdeploy_cache.adapters.fastdeploy.config import DOOR_SETTINGS
from fastdeploy_cache.adapters.fastdeploy.hook import UnknownVersionError
from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.errors import ConfigError
from tests.rigs.fastdeploy_engine import SUFFIX, launch, new_config
from tests.rigs.stand_in_fastdeploy import BODIES, CALLS, write

OURS = PrefixCacheManager.__module__
SERVER = "fastdeploy.entrypoints.openai.api_server"


def door(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the door in a process of its own, where the stand-in can be imported."""
    command = [sys.executable, "-m", "fastdeploy_cache.adapters.fastdeploy.run", *args]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)


@pytest.fixture
def hooked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder to write the stand-in to, from which this process imports it, with the hook."""
    monkeypatch.syspath_prepend(str(tmp_path))
    hook.install()
    yield tmp_path
    hook.uninstall()
    for name in [name for name in sys.modules if name.partition(".")[0] == "fastdeploy"]:
        del sys.modules[name]


@pytest.mark.processes
def test_the_engine_gets_ours_wherever_it_makes_its_manager(tmp_path: Path) -> None:
    """In the process of the entry point, in a forked child, in spawned ones and their children, and by a fork server;
    the entry point sees its own arguments, and each replacement is one line of the log."""
    done = door(write(tmp_path), SERVER, "fork", "spawn", "forkserver")
    assert done.stdout.splitlines() == [
        f"here {OURS}",
        "argv fork spawn forkserver",
        "file True",
        f"fork {OURS}",
        "exit 0",
        f"spawn {OURS}",
        f"spawned twice {OURS}",
        "exit 0",
        f"forkserver {OURS}",
        "exit 0",
    ]
    assert done.returncode == 0 and done.stderr.count("event=replaced") == 4  # the fork has it already


@pytest.mark.processes
@pytest.mark.parametrize("starter", ["openai.multi_api_server", "cli.main"])
def test_api_servers_that_are_started_by_command_get_ours_and_no_other_command(tmp_path: Path, starter: str) -> None:
    """`python -m ...api_server` goes through the door. What else is started is left alone."""
    done = door(write(tmp_path), f"fastdeploy.entrypoints.{starter}", "fork")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"here {OURS}" and f"fork {OURS}" in done.stdout
    assert done.stdout.splitlines()[-1] == f"other {hook.MODULE}"


@pytest.mark.processes
def test_nothing_happens_where_the_manager_is_never_imported(tmp_path: Path) -> None:
    """The entry point runs as by itself, and no line is logged."""
    done = door(write(tmp_path), SERVER, "nothing")
    assert (done.returncode, done.stdout, done.stderr) == (0, "nothing False\n", "")


@pytest.mark.processes
def test_a_wrong_command_line_says_what_is_right(tmp_path: Path) -> None:
    """Without a module, with settings that cannot be read, and with a module that is not there."""
    assert door(tmp_path).returncode == 2 and "usage: " in door(tmp_path).stderr
    assert "cannot read settings" in door(tmp_path, "--settings", str(tmp_path / "none.toml"), SERVER).stderr
    assert door(tmp_path, SERVER).returncode == 1


def test_the_manager_is_ours_and_can_be_made(hooked: Path) -> None:
    """The resource manager of the stand-in makes ours, by its own constructor call."""
    write(hooked)
    resources = importlib.import_module("fastdeploy.engine.resource_manager").ResourceManager(new_config())
    assert type(resources.cache_manager) is PrefixCacheManager
    resources.cache_manager.close()


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("update_cache_blocks", "task, block_size"),  # as a version of 2025 has it
        (
            "launch_cache_manager",
            "cache_config, tensor_parallel_size, device_ids, engine_worker_queue_port, pid_suffix",
        ),
        ("allocate_gpu_blocks", "req_id, num_blocks"),
        ("__init__", "config, tensor_parallel_size, splitwise_role, local_data_parallel_id, layers"),
        ("a_call_of_tomorrow", "task"),
    ],
)
def test_an_unknown_version_is_refused_at_its_import(hooked: Path, name: str, parameters: str) -> None:
    """A call that ours does not take as it is given there is named, and the engine never gets a manager."""
    write(hooked, {**CALLS, name: parameters})
    with pytest.raises(UnknownVersionError, match=name):
        importlib.import_module("fastdeploy.engine.resource_manager")
    assert hook.MODULE not in sys.modules


@pytest.mark.parametrize("name", ["request_match_blocks", "update_cache_blocks"])
def test_a_version_that_writes_other_names_is_refused(hooked: Path, name: str) -> None:
    """Versions of 2025 have the same calls, but their scheduler reads `cached_block_num`: with ours it would give
    cached blocks back."""
    write(hooked, bodies={**BODIES, name: BODIES[name].replace("num_cached_blocks", "cached_block_num")})
    with pytest.raises(UnknownVersionError, match=f"{name} does not write num_cached_blocks"):
        importlib.import_module(hook.MODULE)


def test_calls_that_a_version_does_not_have_are_not_missed(hooked: Path) -> None:
    """Nor are steps inside it, or parameters that came later."""
    calls = {name: each for name, each in CALLS.items() if name != "reset"}
    inside = {"cal_block_hash": "block", "issue_prefetch_storage_task": "req_id, hash_keys, gpu_block_ids"}
    write(hooked, {**calls, **inside, "allocate_gpu_blocks": "num_blocks"})
    assert importlib.import_module(hook.MODULE).PrefixCacheManager is PrefixCacheManager


def test_a_module_without_the_class_is_refused(hooked: Path) -> None:
    """A FastDeploy whose cache manager lies elsewhere is not known."""
    (write(hooked) / "fastdeploy" / "cache_manager" / "prefix_cache_manager.py").write_text("")
    with pytest.raises(UnknownVersionError, match="no class PrefixCacheManager"):
        importlib.import_module(hook.MODULE)


def test_the_hook_has_to_come_first(hooked: Path) -> None:
    """Where the class has been handed out already, replacing it would reach some of its users only."""
    write(hooked)
    importlib.import_module(hook.MODULE)
    with pytest.raises(ConfigError, match="imported already"):
        hook.install()


def test_by_the_door_no_rank_is_started_where_nothing_is_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """FastDeploy's workers keep their KV arrays: the launch returns no process that the engine's end could kill."""
    monkeypatch.setenv(DOOR_SETTINGS, '{"load_policy": "always"}')
    config = new_config()
    del config.cache_config.fastdeploy_cache
    manager = PrefixCacheManager(config, 1)
    assert launch(manager, f"d{SUFFIX}") == [] and manager.cache.config.layout is None
    assert manager.cache.config.load_policy == "always"
    manager.close()


@pytest.mark.parametrize("asked", [{"num_cpu": 8}, {"kvcache_storage_backend": "file"}])
def test_by_the_door_copies_need_the_workers_arrays(monkeypatch: pytest.MonkeyPatch, asked: dict[str, object]) -> None:
    """A CPU tier or a store over arrays of our own would copy what no worker has written: it is refused."""
    monkeypatch.setenv(DOOR_SETTINGS, "{}")
    config = new_config(**asked)  # type: ignore[arg-type]
    del config.cache_config.fastdeploy_cache
    with pytest.raises(ConfigError, match="asks for copies of KV arrays"):
        PrefixCacheManager(config, 1)
