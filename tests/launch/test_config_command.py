"""`fastdeploy-cache config show` and `sample`, `-h`, and commands in a pipe."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.config.cache import CONFIG_KINDS
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.bench import machine
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.config_check import find_problems
from fastdeploy_cache.launch.config_show import sample_file
from fastdeploy_cache.launch.reference_engine import weights
from fastdeploy_cache.policies import EVICTION_POLICIES
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from fastdeploy_cache.transfer_manager.kv.parts import STORAGE_DTYPES

COMMAND = [sys.executable, "-m", "fastdeploy_cache.launch"]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *words], env={**os.environ, **variables}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.processes
def test_show_says_where_each_value_comes_from(tmp_path: Path) -> None:
    """The file with its line, a variable, a default; as a table and as JSON."""
    path = tmp_path / "cache.toml"
    path.write_text('num_gpu_blocks = 8\n\n[transfer]\nlog_dir = "log"\n')
    variables = {"FASTDEPLOY_CACHE_TRANSFER_CLIENT": "inline"}
    shown = run("config", "show", str(path), **variables)
    lines = {tuple(line.split(maxsplit=3)) for line in shown.stdout.splitlines() if line.startswith("*")}
    assert lines == {
        ("*", "num_gpu_blocks", "8", f"{path}, line 1"),
        ("*", "transfer.log_dir", '"log"', f"{path}, line 4"),
        ("*", "transfer_client", '"inline"', "environment variable FASTDEPLOY_CACHE_TRANSFER_CLIENT"),
    }
    found = json.loads(run("config", "show", str(path), "--json", **variables).stdout)
    assert found["transfer.log_dir"] == {"value": "log", "origin": f"{path}, line 4"}
    assert found["block_size"] == {"value": CacheConfig(num_gpu_blocks=8, transfer_client="inline").block_size} | {
        "origin": "default"
    }


def shown(*words: str) -> tuple[int, dict[str, list[str]], str]:
    """Status, value and origin by name, and standard error."""
    result = CliRunner().invoke(app, ["config", "show", *words])
    assert result.exception is None or isinstance(result.exception, (SystemExit, ConfigError))
    rows = [line.lstrip("* ").split(maxsplit=2) for line in result.stdout.splitlines()]
    return result.exit_code, {name: rest for name, *rest in rows}, str(result.exception or "")


def test_show_says_what_follows(tmp_path: Path) -> None:
    """Sizes that come of a ratio or of bytes, who owns the KV, the devices: not empty, and not marked as said."""
    path = tmp_path / "cache.toml"
    layout = "[layout]\nnum_layers = 1\nnum_kv_heads = 2\nhead_dim = 8\n[transfer]\ntp_size = 2\n"
    path.write_text("gpu_memory_bytes = 1048576\ncpu_to_gpu_ratio = 2.0\n" + layout)
    status, rows, _ = shown(str(path))
    num_blocks = CacheConfig.load(path, environment={}).pool_sizes()[0]
    assert status == 0 and rows["num_gpu_blocks"] == [str(num_blocks), "follows from gpu_memory_bytes"]
    assert rows["num_cpu_blocks"] == [str(2 * num_blocks), "follows from cpu_to_gpu_ratio"]
    assert rows["transfer.kv_owner"] == ['"engine"', "follows from transfer.device"]
    assert " ".join(" ".join(rows["transfer.device_ids"]).split()) == "[0, 1] follows from tp_size"


def test_show_of_settings_that_are_not_enough(tmp_path: Path) -> None:
    """What was said is shown, with its lines; the reason comes with status 1. Without a file one is asked for."""
    path = tmp_path / "cache.toml"
    path.write_text("num_cpu_blocks = 200\n[transfer]\ntp_size = 3\n")
    status, rows, reason = shown(str(path))
    assert status == 1 and "give one of num_gpu_blocks" in reason
    assert rows == {"num_cpu_blocks": ["200", f"{path}, line 1"], "transfer.tp_size": ["3", f"{path}, line 3"]}
    status, rows, reason = shown()
    assert status == 1 and not rows and "give a FILE" in reason


def test_show_of_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own file, wherever that is, and the layout of its model."""
    spec = SimpleNamespace(num_layers=5, num_kv_heads=3, head_dim=64)
    monkeypatch.setattr(weights, "load_model_files", lambda: SimpleNamespace(spec=spec))
    status, rows, _ = shown("--serve")
    assert status == 0 and rows["layout.num_layers"] == ["5", "the model"]
    assert "serve.toml, line" in rows["num_gpu_blocks"][1]


def test_the_sample_loads_and_has_every_setting(tmp_path: Path) -> None:
    """As it is, which `config check` has nothing against, and with all that has a value uncommented: every key is
    known, and means its default. What has no default, and is needed, has an example."""
    text = sample_file()
    assert all(
        f"{field.name} =" in text
        for kind in CONFIG_KINDS.values()
        for field in dataclasses.fields(kind)
        if (field.name not in CONFIG_KINDS)
    )
    (tmp_path / "cache.toml").write_text(text)
    config = CacheConfig.load(tmp_path / "cache.toml", environment={})
    layout = KVLayout(num_layers=30, num_kv_heads=3, head_dim=64)
    assert config == CacheConfig(block_size=64, num_gpu_blocks=256, layout=layout)
    assert find_problems(config) == []
    settings = [line.removeprefix("# ") for line in text.splitlines() if line.startswith("# [") or " = " in line]
    values = [line for line in settings if not line.endswith("=") and line.partition(" = ")[0].isidentifier()]
    assert len(values) > 60
    for line in values:
        tomllib.loads(line)
    for table, kind in CONFIG_KINDS.items():
        for field in dataclasses.fields(kind):
            if field.default is field.default_factory is dataclasses.MISSING:
                assert any(line.startswith(f"{field.name} = ") for line in values), f"{table}.{field.name}"


def test_names_in_docstrings_are_the_choices() -> None:
    """What the sample says of policies and dtypes is what there is."""
    text = " ".join(sample_file().replace("\n#", " ").split())
    assert f"{', '.join(EVICTION_POLICIES[:-1])} or {EVICTION_POLICIES[-1]}." in text
    known = list(STORAGE_DTYPES)
    assert f"{', '.join(known[:-1])} or {known[-1]}." in text


def commands_below(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from commands_below(command, (*words, name))
        yield (*words, name), command


def test_every_help_has_an_example_that_is_accepted() -> None:
    """The own words of each command and each group, with options that it has; nothing is run."""
    group: Any = typer.main.get_command(app)
    assert str(group.epilog).removeprefix("Example: fastdeploy-cache ") in group.commands
    found = list(commands_below(group))
    assert len(found) > 20
    for words, command in found:
        example = str(command.epilog).removeprefix("Example: ").partition(" > ")[0]
        variables = example.split(" fastdeploy-cache ")[0] if not example.startswith("fastdeploy-cache ") else ""
        name, *given = shlex.split(example.removeprefix(variables).strip())
        assert name == "fastdeploy-cache" and tuple(given[: len(words)]) == words, example
        command.make_context(words[-1], given[len(words) :], parent=group.make_context(name, [words[0]]))


@pytest.mark.processes
@pytest.mark.parametrize("words", [["-h"], ["config", "-h"], ["bench", "transfer", "-h"], ["storage", "ls", "-h"]])
def test_h_is_help_everywhere(words: list[str]) -> None:
    """At the top and below."""
    said = run(*words)
    assert said.returncode == 0 and "Usage:" in said.stdout


@pytest.mark.processes
@pytest.mark.parametrize("words", [["config", "sample"], ["config", "show", "--json"], ["--help"]])
def test_a_closed_pipe_is_no_traceback(words: list[str]) -> None:
    """Whoever reads has enough: nothing is said about it."""
    read, write = os.pipe()
    os.close(read)
    variables = {**os.environ, "FASTDEPLOY_CACHE_NUM_GPU_BLOCKS": "4", "FASTDEPLOY_CACHE_TRANSFER_CLIENT": "inline"}
    said = subprocess.run(
        [*COMMAND, *words], stdout=write, stderr=subprocess.PIPE, env=variables, text=True, timeout=60, check=False
    )
    os.close(write)
    assert said.stderr == "" and said.returncode != 2


@pytest.mark.parametrize(("load", "is_busy"), [(9.0, True), (0.5, False)])
def test_a_busy_machine_is_told_with_the_figures(monkeypatch: pytest.MonkeyPatch, load: float, is_busy: bool) -> None:
    """More waits for the cores than there are: the figures mean little."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    assert ("BUSY (load 9.0 on 2 cores)" in machine.describe_machine()["text"]) == is_busy
