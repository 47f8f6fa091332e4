"""What `config check` and `config show` say of a hybrid model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.cli import app
from fastdeploy_cache.launch.config_check import describe
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.hybrid_models import GEMMA_3, GPT_OSS, NEMOTRON_H, QWEN3_NEXT, TABLES


@pytest.mark.parametrize(
    ("layout", "row", "worth", "checkpoint", "empty"),
    [
        (GPT_OSS, "row window 128: 12 layers; 768 units of 1572864 bytes a rank, 1.12 GiB",
         "2 units, as full KV of 128 tokens",
         "at most 3145728 bytes a rank (3.0 MiB), as full KV of 128 tokens; 2 pages", "0.0%"),
        (GEMMA_3, "row window 1024: 52 layers; 5248 units of 27262976 bytes a rank, 133.25 GiB",
         "16 units, as full KV of 5325 tokens",
         "at most 436207616 bytes a rank (416.0 MiB), as full KV of 5325 tokens; 84 pages", "1.0%"),
        (QWEN3_NEXT, "row state: 36 layers; 384 units of 39518208 bytes a rank, 14.13 GiB",
         "1 unit, as full KV of 1608 tokens",
         "at most 39518208 bytes a rank (37.7 MiB), as full KV of 1608 tokens; 26 pages", "3.4%"),
        (NEMOTRON_H, "row state: 24 layers; 384 units of 102137856 bytes a rank, 36.53 GiB",
         "1 unit, as full KV of 6234 tokens",
         "at most 102137856 bytes a rank (97.4 MiB), as full KV of 6234 tokens; 98 pages", "0.6%"),
    ],
)  # fmt: skip
def test_sizes_of_real_models(layout: KVLayout, row: str, worth: str, checkpoint: str, empty: str) -> None:
    """Each row's units and bytes, what a checkpoint takes of the CPU tier, and what it is worth in full KV."""
    config = CacheConfig(num_gpu_blocks=16384, num_cpu_blocks=4096, layout=layout, transfer_client="inline")
    words = describe(config)
    assert row in words and f"  of a checkpoint: {worth}" in words
    assert f"checkpoint: {checkpoint} of the CPU pool, of which {empty} stays empty" in words
    assert f"row full: {sum(len(g.layers) for g in layout.groups if g.kind == 'full')} layers; 16384 blocks" in words


def test_two_ranks_share_states_and_heads() -> None:
    """All figures are of one rank."""
    config = CacheConfig.load(
        environment={}, num_gpu_blocks=64, layout=QWEN3_NEXT, transfer_client="inline", transfer={"tp_size": 2}
    )
    assert "conv [4096, 3] bfloat16, ssm [16, 128, 128] bfloat16" in describe(config)
    assert "at most 19759104 bytes a rank" in describe(config)


def test_show_has_a_line_for_each_group(tmp_path: Path) -> None:
    """With what it says and where, as text and as JSON; units that nobody has said follow from `max_running`."""
    (tmp_path / "cache.toml").write_text(TABLES)
    file = str(tmp_path / "cache.toml")
    words = CliRunner().invoke(app, ["config", "show", file]).stdout
    window = '{kind = "window", layers = [1], reach_tokens = 10, own_units = false}'
    assert "* layout.groups[1]  " in words and window in words
    found = json.loads(CliRunner().invoke(app, ["config", "show", file, "--json"]).stdout)
    parts = found["layout.groups[2]"]["value"]["parts"]
    assert [part["name"] for part in parts] == ["conv", "ssm"]
    assert found["layout.groups[2]"]["origin"] == f"{file}, line 17"
    assert found["num_gpu_units"] == {"value": [13, 5], "origin": "follows from max_running"}


def test_show_prints_a_file_with_an_error_in_it(tmp_path: Path) -> None:
    """Each group that is said, with its line, and the error behind them."""
    (tmp_path / "cache.toml").write_text(TABLES.replace('kind = "window"', 'kind = "windows"', 1))
    done = CliRunner().invoke(app, ["config", "show", str(tmp_path / "cache.toml")])
    assert done.exit_code == 1 and "layout.groups[1].kind is 'windows'" in str(done.exception)
    assert "* layout.groups[1].kind  " in done.output and "windows" in done.output


def test_check_refuses_what_the_manager_would(tmp_path: Path) -> None:
    """A CPU pool that holds no checkpoint is a problem, and not only to whoever starts an engine with it."""
    (tmp_path / "cache.toml").write_text(f"num_cpu_blocks = 3\n{TABLES}")
    done = CliRunner().invoke(app, ["config", "check", str(tmp_path / "cache.toml")])
    said = "the CPU pool has 3 blocks, and a checkpoint and one block take 5; give num_cpu_blocks 5 or more"
    assert isinstance(done.exception, ConfigError) and said in str(done.exception)
    (tmp_path / "cache.toml").write_text(f"num_cpu_blocks = 5\n{TABLES}")
    done = CliRunner().invoke(app, ["config", "check", str(tmp_path / "cache.toml")])
    assert done.exit_code == 0, done.output


def test_a_uniform_model_has_no_rows() -> None:
    """It is described as before."""
    layout = dataclasses.replace(GPT_OSS, groups=())
    words = describe(CacheConfig(num_gpu_blocks=64, layout=layout, transfer_client="inline"))
    assert "parts of a block in each of 24 layers: key [64, 8, 64] bfloat16, value" in words
    assert "row" not in words and "checkpoint" not in words
