"""Settings of hybrid models: units by row, checkpoints, files with lists of tables, and what is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.adapters.mini_sglang.radix_cache import new_manager
from fastdeploy_cache.adapters.sglang.config import new_config
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.transfer_manager.config import TransferConfig
from fastdeploy_cache.transfer_manager.kv.layout import KVLayout
from tests.rigs.hybrid_models import GEMMA_3, SMALL, TABLES

UNIFORM = KVLayout(num_layers=2, num_kv_heads=2, head_dim=4)


def config(**fields: Any) -> CacheConfig:
    base = {"block_size": 4, "num_gpu_blocks": 64, "layout": SMALL, "transfer_client": "inline", "max_running": 3}
    return CacheConfig(**{**base, **fields})


def written(tmp_path: Path, old: str = "", new: str = "") -> CacheConfig:
    assert old in TABLES
    (tmp_path / "cache.toml").write_text(TABLES.replace(old, new, 1))
    return CacheConfig.load(tmp_path / "cache.toml", environment={})


def test_units_by_default() -> None:
    """What the running requests need, and a checkpoint for each 4,096 tokens of the pool: windows of 10 tokens are 3
    blocks, the one that is computed and the next one, states are two, chunks of 12 are 2 blocks and two."""
    assert config().unit_counts() == (3 * 5 + 3, 3 * 2 + 1, 3 * 4 + 2)
    assert config(num_gpu_blocks=2048).unit_counts() == (3 * 5 + 2 * 3, 3 * 2 + 2, 3 * 4 + 2 * 2)
    assert config(num_gpu_units=(8, 2, 6)).unit_counts() == (8, 2, 6)
    assert config(layout=UNIFORM).unit_counts() == ()


def test_a_pool_in_bytes_holds_all_rows() -> None:
    """The most blocks whose bytes fit together with the units that go with them, and not one more."""
    needed = config(num_gpu_blocks=300)
    layout = needed.rank_layout()
    assert layout is not None
    num_bytes = layout.gpu_bytes(300)
    for given, blocks in ((num_bytes, 300), (num_bytes - 1, 299), (num_bytes + 1, 300)):
        assert config(num_gpu_blocks=None, gpu_memory_bytes=given).pool_sizes()[0] == blocks
    with pytest.raises(ConfigError, match=r"bytes beside the units of the other rows; the GPU pool needs"):
        config(num_gpu_blocks=None, gpu_memory_bytes=layout.block_bytes)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_gpu_units": (7, 2, 6)},
         "num_gpu_units[0] is 7, and one request with its checkpoint needs 8 units of the row 'window 10'"),
        ({"num_gpu_units": (8, 1, 6)},
         "num_gpu_units[1] is 1, and one request with its checkpoint needs 2 units of the row 'state'"),
        ({"num_gpu_units": (4, 2)},
         "num_gpu_units is [4, 2], and layout.groups makes 3 rows behind the full one: window 10, state, chunk 12"),
        ({"num_gpu_units": (4, 2, 2.5)}, "num_gpu_units is [4, 2, 2.5]; give whole numbers"),
        ({"num_gpu_units": (5, 2, 2**31)}, "num_gpu_units is [5, 2, 2147483648]; give whole numbers, each below 2147"),
        ({"num_gpu_units": 8}, "num_gpu_units is 8; give a list of whole numbers"),
        ({"num_gpu_blocks": None, "gpu_memory_bytes": 2**20, "num_gpu_units": (5, 2)},
         "num_gpu_units is [5, 2], and layout.groups makes 3 rows behind the full one"),
        ({"max_running": 2**40},
         "the row 'window 10' needs 5497558138883 units for max_running 1099511627776; ids are 32 bits wide"),
        ({"num_gpu_units": (4,), "layout": UNIFORM}, "num_gpu_units is [4] without layout.groups; leave it out"),
        ({"max_running": 0}, "max_running is 0; it must be at least 1"),
        ({"checkpoint_every_tokens": -4}, "checkpoint_every_tokens is -4; use a multiple of block_size 4, or 0"),
        ({"checkpoint_every_tokens": 6}, "checkpoint_every_tokens is 6; use a multiple of block_size 4, or 0"),
        ({"recompute_last_token": True},
         "recompute_last_token is True with layout.groups of which one is a state, kept where a block ends"),
        ({"state_copy": True, "layout": UNIFORM}, "state_copy is True, and no group of layout.groups is of the kind"),
        ({"checkpoints_per_path": -1}, "checkpoints_per_path is -1; use 0 or more"),
        ({"layout": GEMMA_3, "block_size": 64, "num_cpu_blocks": 84},
         "the CPU pool has 84 blocks, and a checkpoint and one block take 85; give num_cpu_blocks 85 or more, or 0"),
        ({"num_cpu_blocks": 85, "transfer": TransferConfig(max_tasks_in_flight=1)},
         "transfer.max_tasks_in_flight is 1, and a load of full KV and its checkpoint is 2 tasks; give 2 or more"),
    ],
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], words: str) -> None:
    """One error each: the field, its value, and what to give."""
    with pytest.raises(ConfigError, match=re.escape(words)):
        config(**fields)
    assert config(layout=GEMMA_3, block_size=64, num_cpu_blocks=85).pool_sizes()[1] == 85


def test_who_cannot_serve_them_says_so() -> None:
    """Adapters, by name, before anything is started."""
    layout = {"page_size": 4, "layout": SMALL}
    for who, make in (
        ("the radix cache of SGLang", lambda: new_config(64, transfer_client="inline", **layout)),
        ("the radix cache of mini-sglang", lambda: new_manager(16, **layout)),
    ):
        words = (
            f"layout.groups has kinds full, window, state, chunk, which {who} does not serve; leave layout.groups out"
        )
        with pytest.raises(ConfigError, match=re.escape(words)):
            make()


def test_a_file_with_lists_of_tables(tmp_path: Path) -> None:
    """Groups and the parts of their states; the same from an inline list, and from Python."""
    loaded = written(tmp_path)
    assert loaded.layout is not None and [group.kind for group in loaded.layout.groups] == ["full", "window", "state"]
    assert [part.shape for part in loaded.layout.groups[2].parts] == [(4,), (4, 2)]
    inline = 'groups = [{kind = "full", layers = [0, 1]}, {kind = "window", reach_tokens = 3, layers = [2]}]\n[x]'
    head = TABLES.partition("[[layout.groups]]")[0]
    (tmp_path / "inline.toml").write_text(head + inline.removesuffix("[x]"))
    groups = CacheConfig.load(tmp_path / "inline.toml", environment={}).layout
    assert groups is not None and groups.groups[1].reach_tokens == 3
    again = CacheConfig.load(
        environment={}, layout=loaded.layout, num_gpu_blocks=64, transfer_client="inline", block_size=4, max_running=2
    )
    assert again == loaded


@pytest.mark.parametrize(
    ("old", "new", "line", "words"),
    [
        ("reach_tokens = 10", "reach_token = 10", 15, "unknown key 'layout.groups[1].reach_token'; did you mean"),
        ("reach_tokens = 10", "reach_tokens = 0", 15, "layout.groups[1].reach_tokens is 0; give the window's tokens"),
        ("reach_tokens = 10", "reach_tokens = '9'", 15, "layout.groups[1].reach_tokens is '9'; give a whole number"),
        ("reach_tokens = 10", "reach_tokens = 1.5", 15, "layout.groups[1].reach_tokens is 1.5; give a whole number"),
        ('kind = "window"', 'kind = "sliding"', 14, "layout.groups[1].kind is 'sliding'; use one of full, window"),
        ('kind = "window"', "", 13, "layout.groups[1].kind is missing; give it"),
        ("shape = [4, 2]", "shape = [0]", 25, "layout.groups[2].parts[1].shape is [0]; give sizes of 1 or more"),
        ("shape = [4, 2]", "shapes = [0]", 25, "unknown key 'layout.groups[2].parts[1].shapes'; did you mean"),
        ("shape = [4, 2]", "", 23, "layout.groups[2].parts[1].shape is missing; give it"),
        ("[[layout.groups]]", "[layout.groups]", None, "cannot read configuration"),
    ],
)  # fmt: skip
def test_errors_name_file_line_and_place(tmp_path: Path, old: str, new: str, line: int | None, words: str) -> None:
    """Of an entry of a list as of any other setting."""
    with pytest.raises(ConfigError, match=re.escape(words)) as error:
        written(tmp_path, old, new)
    where = "cannot read" if line is None else f"{tmp_path / 'cache.toml'}, line {line}: "
    assert str(error.value).startswith(where)


@pytest.mark.parametrize("given", ["4", "[4]", '"full"', "{}"])
def test_groups_that_are_no_list_of_tables(tmp_path: Path, given: str) -> None:
    """Said with the line, and how a list of tables is written."""
    (tmp_path / "cache.toml").write_text(TABLES.partition("[[layout.groups]]")[0] + f"groups = {given}\n")
    words = r"cache\.toml, line 10: layout\.groups is .*; it is a list of tables, each written as \[\["
    with pytest.raises(ConfigError, match=words):
        CacheConfig.load(tmp_path / "cache.toml", environment={})


def test_units_from_a_variable(tmp_path: Path) -> None:
    """A list of numbers with commas, as of devices."""
    written(tmp_path)
    variables = {"FASTDEPLOY_CACHE_NUM_GPU_UNITS": "9,7", "FASTDEPLOY_CACHE_MAX_RUNNING": "1"}
    assert CacheConfig.load(tmp_path / "cache.toml", environment=variables).unit_counts() == (9, 7)
