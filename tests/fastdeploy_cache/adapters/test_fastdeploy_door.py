"""The door for FastDeploy's users: its entry point run with our cache manager in the place of its own."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache.adapters.fastdeploy import hook
from fastdeploy_cache.adapters.fastdeploy.config import DOOR_SETTINGS, check_settings
from fastdeploy_cache.adapters.fastdeploy.hook import UnknownVersionError
from fastdeploy_cache.adapters.fastdeploy.manager import PrefixCacheManager
from fastdeploy_cache.errors import CacheError, ConfigError
from tests.rigs.fastdeploy_engine import SUFFIX, launch, new_config
from tests.rigs.stand_in_fastdeploy import BODIES, CALLS, write

OURS = PrefixCacheManager.__module__
DOOR = "fastdeploy_cache.adapters.fastdeploy.run"
SERVER = "fastdeploy.entrypoints.openai.api_server"


def door(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    """Run the door in a process of its own, where the stand-in can be imported."""
    return _python(folder, "-m", DOOR, *args)


def _python(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(folder), str(Path.cwd())])}
    return subprocess.run(
        [sys.executable, *args], env=environment, cwd=folder, capture_output=True, text=True, timeout=120, check=False
    )


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


# What a module can see of how it was started, and what a function of its own sees in its children.
_TELLTALE = """
import multiprocessing, sys
IMPORTS

def of_child(method):
    print(method, __name__, sys.modules["__main__"].__spec__.name, flush=True)

if __name__ == "__main__":
    print(__name__, __package__, __file__, __cached__, __doc__, type(__loader__).__name__)
    print(__spec__.name, __spec__.parent, __spec__.origin, globals() is vars(sys.modules["__main__"]))
    print(sys.path[0], sys.argv, VALUE, flush=True)
    for method in ("spawn", "forkserver"):
        child = multiprocessing.get_context(method).Process(target=TARGET, args=(method,))
        child.start()
        child.join(60)
    sys.exit(3)
"""
_OTHER = "VALUE = 1\ndef tell(method): print(method, __name__, flush=True)\n"


@pytest.mark.processes
@pytest.mark.parametrize("name", ["pack", "pack.inner", "single"])
def test_a_module_runs_as_by_python_itself(tmp_path: Path, name: str) -> None:
    """A package with a `__main__`, a module inside a package, and one outside: each sees what `python -m` shows it, and
    so do its children by `spawn` and by a fork server; its exit status is the same."""
    texts = {
        "pack/__init__.py": "",
        "pack/other.py": _OTHER,
        "pack/__main__.py": _telltale("from .other import VALUE, tell", "tell"),
        "pack/inner.py": _telltale("from .other import VALUE", "of_child"),
        "single.py": _telltale("VALUE = 1", "of_child"),
    }
    for path, text in texts.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    alone, by_door = (_python(tmp_path, "-m", *start, name, "a", "--settings") for start in ([], [DOOR]))
    assert (alone.returncode, alone.stdout.count("\n"), alone.stderr) == (3, 5, "")
    assert (by_door.returncode, by_door.stdout, by_door.stderr) == (3, alone.stdout, "")


def _telltale(imports: str, target: str) -> str:
    return _TELLTALE.replace("IMPORTS", imports).replace("TARGET", target)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([], "the module to run is missing; usage: "),
        (["--setings", "x", SERVER], "there is no option '--setings'; usage: "),
        (["--settings"], "cannot use the settings '.'"),
        (["--settings", "none.toml", SERVER], "cannot use the settings 'none.toml': No such file"),
        (["--settings=bad.toml", SERVER], "cannot use the settings 'bad.toml': Expected '=' after a key"),
        (["--settings", "key.toml", SERVER], "unknown key 'lod_policy'; did you mean 'load_policy'?"),
        (["--settings", "value.toml", SERVER], "transfer.max_tasks_in_flight is 0"),
        (["no_such_package.server"], "No module named 'no_such_package'"),
        ([f"{SERVER}s"], f"there is no module '{SERVER}s' in {sys.executable}"),
        (["fastdeploy.engine"], "there is no module 'fastdeploy.engine.__main__'"),
    ],
)
def test_a_wrong_command_line_is_one_line(tmp_path: Path, args: list[str], said: str) -> None:
    """And exit status 2. Settings are read, and checked, before anything of FastDeploy is imported."""
    (tmp_path / "bad.toml").write_text("load_policy")
    (tmp_path / "key.toml").write_text("lod_policy = 'always'")
    (tmp_path / "value.toml").write_text("transfer = {max_tasks_in_flight = 0}")
    (write(tmp_path) / "fastdeploy" / "__init__.py").write_text("print('imported')")
    done = door(tmp_path, *args)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("fastdeploy_cache.adapters.fastdeploy.run: ") and said in done.stderr
    assert "--settings" not in "".join(args) or not done.stdout


@pytest.mark.processes
def test_an_unknown_version_ends_with_one_line(tmp_path: Path) -> None:
    """An entry point whose cache manager has other calls names the difference, and nothing else."""
    done = door(write(tmp_path, {**CALLS, "a_call_of_tomorrow": "task"}), SERVER, "fork")
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
    assert "a_call_of_tomorrow is not known here" in done.stderr


@pytest.mark.processes
def test_help_says_how_it_is_called(tmp_path: Path) -> None:
    """On standard output, which is no error."""
    done = door(tmp_path, "--help")
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.startswith("usage: python -m ")


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"load_policy": "always", "num_cpu_blocks": 100},
        {"transfer": {"device": "cuda", "kv_owner": "worker", "device_ids": [0, 1]}},
        {"storage": {"weights_id": "w"}},  # the kind may be FastDeploy's to say
        {"storage": {"weights_id": "w", "folder": "/kv", "capacity_bytes": 2**30}},
        {"storage": {"weights_id": "w", "folder": "/kv", "capacity_bytes": "1GiB"}},
        {"peer": {"link": "nixl"}, "storage": {"weights_id": "w"}},  # whose weights are the peer's, too
    ],
    ids=str,
)
def test_settings_that_may_be_right_pass(settings: dict[str, Any]) -> None:
    """What FastDeploy's own configuration may add is not missed."""
    check_settings(settings)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"transfer": 3}, "transfer is 3; it is a table"),
        ({"peer": {"lnk": "shm"}}, "unknown key 'peer.lnk'; did you mean 'peer.link'"),
        ({"storage": {"weights_id": "w", "folder": 5}}, r"storage\.folder is 5; give a text"),
        ({"storage": {"weights_id": "w", "folder": "/kv", "capacity_bytes": "5 racks"}}, "capacity_bytes is '5 racks'"),
        ({"storage": {"folder": "/kv"}}, r"storage\.weights_id is missing; give it"),
        ({"peer": {}}, r"peer\.weights_id is missing; give it"),
        ({"load_policy": "often"}, "load_policy is 'often'; use one of auto, always, never"),
        ({"num_cpu_blocks": -1}, "num_cpu_blocks is -1"),
        ({"role": "prefill"}, "role is 'prefill', and is no setting here"),
        ({"layout": {"num_layers": 2}}, "and is no setting here"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_right_are_refused(settings: dict[str, Any], said: str) -> None:
    """By themselves, without FastDeploy: a wrong key, type or value."""
    with pytest.raises(CacheError, match=said):
        check_settings(settings)


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
