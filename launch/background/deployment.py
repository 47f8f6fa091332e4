"""Files for the programs around this one, with the paths of this installation filled in."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

from fastdeploy_cache import __version__
from fastdeploy_cache.errors import LaunchError

_FOLDER = Path(__file__).with_name("deploy")
_PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # a wheel is for the version that built it


def describe() -> str:
    """The files that there are, a line each: the name, and what it says of itself."""
    lines = [f"{name}: {_purpose(name, _text(name))}" for name in _names()]
    hint = "print one with: fastdeploy-cache deploy --print NAME; write all of them with: --to FOLDER"
    return "\n".join([*lines, hint])


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


def write_all(folder: Path, run_folder: Path) -> list[Path]:
    """Write all of them into a folder, which is made where it is missing; returns what was written.

    Raises:
        LaunchError: one of them is there already, or the folder cannot be written; nothing of ours is left behind.
    """
    texts = {folder / name: filled_in(name, run_folder) for name in _names()}
    there = [str(path) for path in texts if path.exists()]
    if there:
        raise LaunchError(f"there are {', '.join(there)} already; move them away, or name another folder")
    written: list[Path] = []
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            written.append(path)
            path.write_text(text)
    except OSError as error:
        for path in written:
            path.unlink(missing_ok=True)
        reason = error.strerror or error
        raise LaunchError(f"cannot write the files into {folder}: {reason}; name another folder") from error
    return written


def _purpose(name: str, text: str) -> str:
    """The first line of a file or, of one that can have no comment, its field `description`."""
    if name.endswith(".json"):
        return str(json.loads(text)["description"])
    return text.splitlines()[0].removeprefix("# ")


def _names() -> list[str]:
    files = (file for file in _FOLDER.rglob("*") if file.is_file() and not file.name.startswith(("_", ".")))
    return sorted(str(file.relative_to(_FOLDER)) for file in files)


def _text(name: str) -> str:
    return (_FOLDER / name).read_text()
