"""Files for the programs around this one, with the paths of this installation filled in."""

from __future__ import annotations

import importlib.resources
import json
import shutil
import sys
from pathlib import Path

from fastdeploy_cache import __version__
from fastdeploy_cache.errors import LaunchError

_PLACE = "deploy"
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # a wheel is for the version that built it


def describe() -> str:
    """The files that there are, a line each: the name, and what its first line says."""
    lines = [f"{name}: {_text(name).splitlines()[0].removeprefix('# ')}" for name in _names()]
    return "\n".join([*lines, "print one with: fastdeploy-cache deploy --print NAME"])


def filled_in(name: str, run_folder: Path) -> str:
    """The text of one of them.

    Raises:
        LaunchError: there is none of that name.
    """
    if name not in _names():
        raise LaunchError(f"there is no file {name!r} to print; there are {', '.join(_names())}")
    beside = Path(sys.executable).with_name("fastdeploy-cache")
    program = str(beside) if beside.exists() else shutil.which("fastdeploy-cache") or "fastdeploy-cache"
    values = {
        "@PROGRAM@": program,
        "@RUN_DIR@": json.dumps(str(run_folder.absolute()), ensure_ascii=False)[1:-1],  # it stands in quotes in YAML
        "@VERSION@": __version__,
        "@PYTHON@": _PYTHON,
    }
    text = _text(name)
    for placeholder, value in values.items():
        text = text.replace(placeholder, value)
    return text


def _names() -> list[str]:
    return sorted(file.name for file in _folder().iterdir() if not file.name.startswith(("_", ".")))


def _text(name: str) -> str:
    return (_folder() / name).read_text()


def _folder() -> importlib.resources.abc.Traversable:
    return importlib.resources.files("fastdeploy_cache.launch.background") / _PLACE
