"""Settings as people look at them: what is in force and why, and a file of all of them to start from."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.config import CONFIG_KINDS

_WIDTH = 110
_REQUIRED = {"block_size": 64, "num_gpu_blocks": 1024}  # what a sample must say, as it has no default


class InForce(NamedTuple):
    """A setting and its value."""

    name: str  # in a table with the table's name: `transfer.tp_size`
    value: Any
    origin: str  # "default", or where it was said


def settings_in_force(path: Path | None) -> list[InForce]:
    """Every setting, in the order of its class; tables that are not there are left out.

    Raises:
        ConfigError: the settings cannot be.
    """
    config, origins = CacheConfig.load_with_origins(path)
    found = []
    for table in CONFIG_KINDS:
        part = getattr(config, table) if table else config
        if part is None:
            continue
        for field in dataclasses.fields(part):
            if table or field.name not in CONFIG_KINDS:
                name = f"{table}.{field.name}" if table else field.name
                found.append(InForce(name, getattr(part, field.name), origins.get(name, "default")))
    return found


def show_table(found: Sequence[InForce]) -> str:
    """Aligned columns; what is not a default is marked by a star."""
    rows = [("" if each.origin == "default" else "*", each.name, _toml(each.value), each.origin) for each in found]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    return "\n".join(
        f"{row[0]:{widths[0]}} {row[1]:{widths[1]}}  {row[2]:{widths[2]}}  {row[3]}".rstrip() for row in rows
    )


def show_json(found: Sequence[InForce]) -> str:
    """One object for each setting, by name."""
    return json.dumps({each.name: {"value": each.value, "origin": each.origin} for each in found}, indent=2)


def sample_file() -> str:
    """A TOML file that loads as it is: every setting with its meaning, commented out where it has a default."""
    lines = ["# Every setting of the cache. What is commented out has the value that it shows, or none.", ""]
    for table, kind in CONFIG_KINDS.items():
        lines += [f"# [{table}]", ""] if table else []
        meanings = _meanings(kind)
        for field in dataclasses.fields(kind):
            if not table and field.name in CONFIG_KINDS:
                continue
            lines += textwrap.wrap(meanings[field.name], _WIDTH, initial_indent="# ", subsequent_indent="# ")
            if not table and field.name in _REQUIRED:
                lines += [f"{field.name} = {_REQUIRED[field.name]}", ""]
            else:
                lines += [f"# {field.name} = {_default(field)}".rstrip(), ""]
    return "\n".join(lines)


def _meanings(kind: type) -> dict[str, str]:
    """What the docstring's `Args` say of each field; several may stand before one colon."""
    found: dict[str, str] = {}
    names: list[str] = []
    for line in inspect.cleandoc(kind.__doc__ or "").partition("Args:\n")[2].splitlines():
        if line and not line.startswith("    "):  # the next section
            break
        if (head := re.fullmatch(r" {4}(\w+(?:, \w+)*): (.*)", line)) is not None:
            names = head[1].split(", ")
            found |= dict.fromkeys(names, head[2])
        else:
            found |= {name: f"{found[name]} {line.strip()}".strip() for name in names}
    return found


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        return _toml(field.default)
    return _toml(field.default_factory()) if field.default_factory is not dataclasses.MISSING else ""


def _toml(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_toml(each) for each in value)}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + "}"
    return json.dumps(value)
