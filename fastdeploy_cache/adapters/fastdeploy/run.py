"""`python -m fastdeploy_cache.adapters.fastdeploy.run MODULE [ARGS...]`: `python -m MODULE [ARGS...]`, with our cache.

MODULE is one of FastDeploy's own entry points, such as `fastdeploy.entrypoints.openai.api_server`. `--settings FILE`
before it names a TOML file with settings of ours. FastDeploy's engine makes the cache manager in this process, or in a
child that `multiprocessing` starts:

- A forked child has the hook as it is.
- A child of the start methods `spawn` and `forkserver` first runs the parent's main module anew, under the name
  `__mp_main__`. It is told that this module is the main one: it installs the hook, and runs MODULE under that name.
- `multi_api_server`, and `serve` of some versions, start API servers by `subprocess`, as `python -m`. Such a command
  gets this module in front. No other command is touched: the workers of the model never see the hook.
"""

from __future__ import annotations

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from multiprocessing import spawn
from pathlib import Path
from typing import Any

from fastdeploy_cache.adapters.fastdeploy import hook
from fastdeploy_cache.errors import CacheError, ConfigError, reason_of

_SELF = "fastdeploy_cache.adapters.fastdeploy.run"
_RUNNING = "FDCACHE_DOOR_MODULE"  # environment: tells a spawned child which module is the main one
_SETTINGS = "FDCACHE_DOOR_SETTINGS"  # as in `config`, which is imported only where it is needed
_SERVER = "fastdeploy.entrypoints.openai.api_server"
_USAGE = f"usage: python -m {_SELF} [--settings FILE] MODULE [ARGS...]"

_prepare = spawn.get_preparation_data


def run(name: str, args: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Run a module or a package as `python -m` does, with the hook. Changes `sys.argv`, `multiprocessing.spawn`,
    `subprocess.Popen` and the environment.

    `settings`: as in `cache_config.fastdeploy_cache`.

    Raises:
        ConfigError: there is no such module, FastDeploy's cache manager is imported already, or this FastDeploy is not
            known. Whatever the module raises.
    """
    hook.install()
    os.environ[_SETTINGS] = json.dumps(settings, default=str)
    os.environ[_RUNNING] = _find(name).name
    _cover_children()
    sys.argv[:] = [name, *args]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _find(name: str) -> ModuleSpec:
    """Where a module's code is; of a package that is its `__main__`. Imports the packages that it lies in.

    Raises:
        ConfigError: it is not there.
    """
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"cannot find the module {name!r} in {sys.executable}: {error}") from error
    if spec is None:
        raise ConfigError(f"there is no module {name!r} in {sys.executable}; is FastDeploy installed there?")
    return spec if spec.submodule_search_locations is None else _find(f"{name}.__main__")


def _cover_children() -> None:
    """See to it that children of this process have the hook, where they can make a cache manager."""
    subprocess.Popen = _Popen  # type: ignore[misc]
    spawn.get_preparation_data = _prepared


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts API servers through this module, and all else as it is."""

    def __init__(self, args: Any, *others: Any, **settings: Any) -> None:
        if isinstance(args, list) and args[:3] == [sys.executable, "-m", _SERVER]:
            args = [sys.executable, "-m", _SELF, *args[2:]]
        super().__init__(args, *others, **settings)


def _prepared(name: str) -> dict[str, Any]:
    """What `multiprocessing` tells a new child: that its main module is this one."""
    data = _prepare(name)
    data.pop("init_main_from_path", None)
    return {**data, "init_main_from_name": _SELF}


def main(argv: Sequence[str]) -> int:
    """The command line; returns only where MODULE does, or with 2 after a line that says what is wrong.

    Raises:
        Whatever MODULE raises, but a `ConfigError`, which is such a line.
    """
    try:
        if argv[:1] in (["-h"], ["--help"]):
            print(_USAGE)
        else:
            run(*_parsed(argv))
    except ConfigError as error:
        print(f"{_SELF}: {error}", file=sys.stderr)
        return 2
    return 0


def _parsed(argv: Sequence[str]) -> tuple[str, Sequence[str], Mapping[str, Any]]:
    """The module, its arguments and our settings, which are checked.

    Raises:
        ConfigError: the command line or the settings are wrong.
    """
    settings: Mapping[str, Any] = json.loads(os.environ.get(_SETTINGS, "{}"))  # of the process that started this one
    while argv and argv[0].startswith("-"):
        option, equals, value = argv[0].partition("=")
        if option != "--settings":
            raise ConfigError(f"there is no option {argv[0]!r}; {_USAGE}")
        value, argv = (value, argv[1:]) if equals else ("".join(argv[1:2]), argv[2:])
        settings = _read(Path(value))
    if not argv:
        raise ConfigError(f"the module to run is missing; {_USAGE}")
    return argv[0], argv[1:], settings


def _read(path: Path) -> dict[str, Any]:
    from fastdeploy_cache.adapters.fastdeploy.config import check_settings

    try:
        settings = tomllib.loads(path.read_text())
        check_settings(settings)
    except (OSError, ValueError, CacheError, RecursionError) as error:  # what is no TOML, too
        raise ConfigError(f"cannot use the settings {str(path)!r}: {reason_of(error)}") from error
    return settings


if __name__ == "__mp_main__" and _RUNNING in os.environ:
    hook.install()
    _cover_children()
    if not os.environ[_RUNNING].endswith(".__main__"):  # of a package `multiprocessing` does not run it either
        globals().update(runpy.run_module(os.environ[_RUNNING], run_name="__mp_main__", alter_sys=True))

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
