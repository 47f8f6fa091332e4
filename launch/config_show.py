"""Settings as people look at them: what is in force and why, and a file of all of them to start from."""

from __future__ import annotations

import dataclasses
import inspect
import json
import os
import re
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.config.cache import CONFIG_KINDS
from fastdeploy_cache.config.sources import Sources, from_environment, from_file
from fastdeploy_cache.config.tables import LISTS

_WIDTH = 110
_WIDEST = 60  # of a column: what is longer moves those behind it
_FOLLOWS = "follows from"
_SAID = {  # what a sample says, as it has no default: with a small model's layout it can be tried as it is
    "block_size": 64,
    "num_gpu_blocks": 256,
    "layout.num_layers": 30,
    "layout.num_kv_heads": 3,
    "layout.head_dim": 64,
}
_EXAMPLES = {  # what has no default, of tables that a sample leaves out
    "storage.weights_id": "my-model@1",
    "storage.folder": "/ssd/kv",
    "peer.weights_id": "my-model@1",
    "events.endpoint": "tcp://127.0.0.1:5557",
    "layout.groups.kind": "window",
    "layout.groups.layers": [0, 1, 2],
    "layout.groups.reach_tokens": 1024,
    "layout.groups.parts.name": "ssm",
    "layout.groups.parts.shape": [32, 128, 128],
}
_LAYOUT_NOTE = (
    "The model's KV, here that of SmolLM2-135M as an example: put yours. A model's config.json calls these "
    "num_hidden_layers, num_key_value_heads and head_dim. `serve` knows its model: leave the table out there."
)


class InForce(NamedTuple):
    """A setting and its value."""

    name: str  # in a table with the table's name: `transfer.tp_size`
    value: Any
    origin: str  # "default", where it was said, or what it follows from

    @property
    def is_said(self) -> bool:
        """Whether somebody has said so."""
        return self.origin != "default" and not self.origin.startswith(_FOLLOWS)


def settings_in_force(path: Path | None) -> list[InForce]:
    """Every setting, in the order of its class; tables that are not there are left out.

    Raises:
        ConfigError: the settings cannot be.
    """
    config, origins = CacheConfig.load_with_origins(path)
    return _in_force(config, origins)


def settings_of_serve(path: Path | None) -> list[InForce]:
    """What `serve` has in force with this file, or with its own one: with its model's layout.

    Raises:
        ConfigError: the settings cannot be.
        ModelLoadError: its model is not here.
    """
    from fastdeploy_cache.launch.reference_engine.serving import layout_of
    from fastdeploy_cache.launch.reference_engine.weights import load_model_files
    from fastdeploy_cache.launch.server.settings import DEFAULT_FILE

    layout = layout_of(load_model_files().spec)
    config, origins = CacheConfig.load_with_origins(path or DEFAULT_FILE, layout=layout)
    return _in_force(config, {name: "the model" if said == "argument" else said for name, said in origins.items()})


def settings_said(path: Path | None) -> list[InForce]:
    """What file and environment say, where that is not enough for a configuration, or cannot be.

    Raises:
        ConfigError: the file cannot be read.
    """
    sources = from_file(path) if path is not None else Sources()
    sources.merge(from_environment(os.environ), ())
    found = []
    for name, origin in sources.origins.items():
        value = sources.value(name)
        if not isinstance(value, dict):
            found.append(InForce(name, value, origin))
    return found


def _in_force(config: CacheConfig, origins: Mapping[str, str]) -> list[InForce]:
    following, found = _following(config), []
    for table in CONFIG_KINDS:
        part = getattr(config, table) if table else config
        if part is None:
            continue
        for field in dataclasses.fields(part):
            if table or field.name not in CONFIG_KINDS:
                name = f"{table}.{field.name}" if table else field.name
                value = getattr(part, field.name)
                if name in LISTS and value:
                    found += _entries_in_force(name, value, origins)
                    continue
                said = InForce(name, value, origins.get(name, "default"))
                found.append(following.get(name, said) if said.value in (None, ()) else said)
    return found


def _entries_in_force(name: str, entries: Sequence[Any], origins: Mapping[str, str]) -> list[InForce]:
    """Each entry of a list of tables, with what it says."""
    found = []
    for place, entry in enumerate(entries):
        said = {key: value for key, value in dataclasses.asdict(entry).items() if value not in (None, ())}
        at = f"{name}[{place}]"
        found.append(InForce(at, said, origins.get(at) or origins.get(name, "default")))
    return found


def _following(config: CacheConfig) -> dict[str, InForce]:
    """What settings come to that say nothing by themselves."""
    (num_gpu_blocks, num_cpu_blocks), transfer = config.pool_sizes(), config.transfer
    has_rows = config.layout is not None and bool(config.layout.groups)
    sizes = [name for name in ("cpu_memory_bytes", "cpu_to_gpu_ratio") if getattr(config, name)]
    origin = f"{_FOLLOWS} {'storage.staging_bytes' if not sizes else sizes[0]}" if num_cpu_blocks else "default"
    found = (
        InForce("num_gpu_blocks", num_gpu_blocks, f"{_FOLLOWS} gpu_memory_bytes"),
        InForce("num_cpu_blocks", num_cpu_blocks, origin),
        InForce("num_gpu_units", list(config.unit_counts()), f"{_FOLLOWS} max_running" if has_rows else "default"),
        InForce("transfer.kv_owner", transfer.owner_of_kv, f"{_FOLLOWS} transfer.device"),
        InForce("transfer.device_ids", list(map(transfer.device_id, range(transfer.tp_size))), f"{_FOLLOWS} tp_size"),
    )
    return {each.name: each for each in found}


def show_table(found: Sequence[InForce]) -> str:
    """Aligned columns; what somebody has said is marked by a star."""
    rows = [("*" if each.is_said else "", each.name, _toml(each.value), each.origin) for each in found]
    widths = [min(_WIDEST, max((len(row[column]) for row in rows), default=0)) for column in range(3)]
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
        lines += _header(table)
        texts = meanings(kind)
        for field in dataclasses.fields(kind):
            if not table and field.name in CONFIG_KINDS:
                continue
            name = f"{table}.{field.name}" if table else field.name
            lines += _comment(texts[field.name])
            if name in LISTS:
                lines += [f"# {field.name} = []  # or tables, such as this one:", "", *_list_sample(name)]
            elif name in _SAID:
                lines += [f"{field.name} = {_SAID[name]}", ""]
            elif name in _EXAMPLES:
                lines += [f"# {field.name} = {_toml(_EXAMPLES[name])}  # an example, and no default", ""]
            else:
                lines += [f"# {field.name} = {_default(field)}".rstrip(), ""]
    return "\n".join(lines)


def _header(table: str) -> list[str]:
    if not table:
        return []
    is_said = any(name.startswith(f"{table}.") for name in _SAID)
    return [*_comment(_LAYOUT_NOTE), f"[{table}]", ""] if is_said else [f"# [{table}]", ""]


def _list_sample(name: str) -> list[str]:
    """Each key of an entry of a list of tables, commented out."""
    texts = meanings(LISTS[name])
    lines = [f"# [[{name}]]"]
    for field in dataclasses.fields(LISTS[name]):
        lines += _comment(texts[field.name])
        inner = f"{name}.{field.name}"
        lines += _list_sample(inner) if inner in LISTS else [f"# {field.name} = {_example(inner, field)}".rstrip()]
        lines += [""]
    return lines


def _example(name: str, field: dataclasses.Field[Any]) -> str:
    return _toml(_EXAMPLES[name]) if name in _EXAMPLES else _default(field)


def _comment(text: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="# ", subsequent_indent="# ")


def meanings(kind: type) -> dict[str, str]:
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
        return "{" + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items() if each is not None) + "}"
    return json.dumps(value)
