"""`python -m fastdeploy_cache.adapters.fastdeploy.run MODULE [ARGS...]`: `python -m MODULE [ARGS...]`, with our cache.

MODULE is one of FastDeploy's own entry points, such as `fastdeploy.entrypoints.openai.api_server`. `--settings FILE`
before it names a TOML file with settings of ours. FastDeploy's engine makes the cache manager in this process, or in a
child that `multiprocessing` starts:

- A forked child has the hook as it is.
- A child of the start methods `spawn` and `forkserver` first runs the parent's main module anew, under the name
  `__mp_main__`. That is this module, by `__main__.__spec__`: it installs the hook, and runs MODULE under that name.
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
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from fastdeploy_cache.adapters.fastdeploy import hook
from fastdeploy_cache.errors import ConfigError

_SELF = "fastdeploy_cache.adapters.fastdeploy.run"
_RUNNING = "FDCACHE_DOOR_MODULE"  # environment: tells a spawned child which module is the main one
_SETTINGS = "FDCACHE_DOOR_SETTINGS"  # as in `config`, which is imported only where a manager is made
_SERVER = "fastdeploy.entrypoints.openai.api_server"


def run(name: str, args: Sequence[str], settings: Mapping[str, Any]) -> None:
    """Run a module as `__main__`, with the hook. Changes `sys.argv`, `sys.modules["__main__"]`, `subprocess.Popen` and
    the environment.

    `settings`: as in `cache_config.fastdeploy_cache`.

    Raises:
        ConfigError: FastDeploy's cache manager is imported already. ImportError: there is no such module.
    """
    hook.install()
    os.environ[_RUNNING] = name
    os.environ[_SETTINGS] = json.dumps(settings, default=str)
    subprocess.Popen = _Popen  # type: ignore[misc]
    own = sys.modules["__main__"].__spec__
    code, path = _code_of(name)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __builtins__=__builtins__, __package__=name.rpartition(".")[0], __spec__=own)
    sys.argv[:] = [path, *args]
    sys.modules["__main__"] = main
    exec(code, main.__dict__)  # noqa: S102 (what `python -m` does)


def _code_of(name: str) -> tuple[CodeType, str]:
    """A module's code, or that of a package's `__main__`, and its file."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return _code_of(f"{name}.__main__")
    code = spec.loader.get_code(name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]
    if spec is None or code is None:
        raise ImportError(f"no module {name}; is FastDeploy installed in {sys.executable}?")
    return code, str(spec.origin)


class _Popen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts API servers through this module, and all else as it is."""

    def __init__(self, args: Any, *others: Any, **settings: Any) -> None:
        if isinstance(args, list) and args[:3] == [sys.executable, "-m", _SERVER]:
            args = [sys.executable, "-m", _SELF, *args[2:]]
        super().__init__(args, *others, **settings)


def main(argv: Sequence[str]) -> int:
    """The command line; returns only where MODULE does.

    Raises:
        ConfigError: the settings cannot be read. Whatever MODULE raises.
    """
    settings = json.loads(os.environ.get(_SETTINGS, "{}"))  # of the process that has started this one
    if argv[:1] == ["--settings"]:
        settings, argv = _read(Path("".join(argv[1:2]))), argv[2:]
    if not argv or argv[0].startswith("-"):
        print(f"usage: python -m {_SELF} [--settings FILE] MODULE [ARGS...]", file=sys.stderr)
        return 2
    run(argv[0], argv[1:], settings)
    return 0


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"cannot read settings {path}: {error}") from error


if __name__ == "__mp_main__" and _RUNNING in os.environ:
    hook.install()
    content = runpy.run_module(os.environ[_RUNNING], run_name="__mp_main__", alter_sys=True)
    globals().update(
        {key: value for key, value in content.items() if key != "__spec__"}
    )  # its children start here, too

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
