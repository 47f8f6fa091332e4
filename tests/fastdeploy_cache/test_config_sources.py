"""An error about a setting says where the setting comes from, in our words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PeerConfig, StorageConfig, TransferConfig
from fastdeploy_cache.config.sources import from_file
from fastdeploy_cache.errors import ConfigError

FILE = """\
block_size = 16
num_gpu_blocks = 64
transfer_client = "inline"

[transfer]  # how ranks run
tp_size = 2
"""


@pytest.mark.parametrize(
    ("line", "wrong", "said"),
    [
        ("num_gpu_blocks = 64", "num_gpu_blocks = 'x'", "line 2: num_gpu_blocks is 'x'; give a whole number"),
        ("tp_size = 2", "tp_size = 'x'", "line 6: transfer.tp_size is 'x'; give a whole number"),
        ("tp_size = 2", "device_ids = 1", "line 6: transfer.device_ids is 1; give a list"),
        ("tp_size = 2", "device_ids = [0, 1.5]", "line 6: transfer.device_ids[1] is 1.5; give a whole number"),
        ("block_size = 16", "block_size = 'x'", "line 1: block_size is 'x'; give a whole number"),
    ],
)
def test_a_wrong_type_in_a_file_is_told_with_its_line(tmp_path: Path, line: str, wrong: str, said: str) -> None:
    """The file, the line, the key with its table, the value seen (in a list the entry), and what it should be."""
    path = tmp_path / "cache.toml"
    path.write_text(FILE.replace(line, wrong))
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(path, environment={})
    assert str(caught.value) == f"{path}, {said}"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("num_gpu_blokcs = 3\n", "line 1: unknown key 'num_gpu_blokcs'; did you mean 'num_gpu_blocks'?"),
        ("load_policy = 'often'\n", "line 1: load_policy is 'often'; use one of auto, always, never"),
        ("enable_prefix_caching = 3\n", "line 1: enable_prefix_caching is 3; give true or false"),
        ("cpu_write_high_water = 7.0\n", "line 1: cpu_write_high_water is 7.0; it is a share, use 0 to 1"),
        ("storage.options = {a = 3}\n", "line 1: storage.options is {'a': 3}; give a text for each entry"),
        ("storage.folder = '/x'\n", "storage.weights_id is missing; give it"),
    ],
)
def test_what_cannot_be_in_a_file_is_told_in_our_words(tmp_path: Path, more: str, said: str) -> None:
    """Misspelt keys, choices, shares, what a table lacks."""
    path = tmp_path / "cache.toml"
    path.write_text(more + FILE)
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(path, environment={})
    assert str(caught.value).endswith(said)
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_told_without_a_number(tmp_path: Path) -> None:
    """The path and the reason, once each."""
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(tmp_path / "none.toml", environment={})
    assert str(caught.value) == f"cannot read configuration {tmp_path / 'none.toml'}: No such file or directory"


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("block_size = '64'", "line 1: block_size is '64'; give a whole number, without quotes"),
        ("hit_rate_window_seconds = '6e1'", "hit_rate_window_seconds is '6e1'; give a number, without quotes"),
        ("cache_outputs = 'true'", "line 1: cache_outputs is 'true'; give true or false, without quotes"),
        ("transfer = {tp_size = '2'}", "transfer.tp_size is '2'; give a whole number, without quotes"),
        ("transfer = {device_ids = ['0']}", "transfer.device_ids is ['0']; give a whole number, without quotes"),
    ],
)
def test_a_text_is_no_number_in_a_file(tmp_path: Path, more: str, said: str) -> None:
    """A variable and `--set` can say nothing but texts; a file can, and does."""
    path = tmp_path / "cache.toml"
    path.write_text(f'{more}\nnum_gpu_blocks = 64\ntransfer_client = "inline"\n')
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(path, environment={})
    assert str(caught.value).endswith(said) and str(path) in str(caught.value)
    path.write_text('num_gpu_blocks = 64\ntransfer_client = "inline"\neviction_history_bytes = "4MiB"\n')
    assert CacheConfig.load(path, environment={"FASTDEPLOY_CACHE_BLOCK_SIZE": "64"}).eviction_history_bytes == 2**22


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("BLOCK_SIZE", "zz", "BLOCK_SIZE: block_size is 'zz'; give a whole number"),
        ("TRANSFER__TP_SIZE__X", "5", "TRANSFER__TP_SIZE__X: unknown key 'transfer__tp_size'; did you mean .*"),
        ("TRANSFER__DEVICE", "tpu", "TRANSFER__DEVICE: transfer.device is 'tpu'; known: cpu, cuda"),
        ("TRANSFER_TP_SIZE", "2", ".*mean .transfer.tp_size.\\?.* that is FASTDEPLOY_CACHE_TRANSFER__TP_SIZE"),
        ("STORAGE_FOLDR", "/x", ".*mean .storage.folder.\\?.* that is FASTDEPLOY_CACHE_STORAGE__FOLDER"),
        ("TRANSFER__DEVICE_IDS", "0,b", r"TRANSFER__DEVICE_IDS: transfer\.device_ids\[1\] is 'b'; give a whole number"),
        ("FOO", "1", "FOO: unknown key 'foo'; it is like no setting; `fastdeploy-cache config sample` prints all .*"),
        ("LAYOUT__FOO", "1", "LAYOUT__FOO: unknown key 'layout.foo'; use one of layout.num_layers, layout.num_kv_.*"),
        ("HOME", "/root", "HOME: unknown key 'home'; .* Unset the variable if it is not meant for this cache."),
    ],
)
def test_a_variable_is_named(name: str, value: str, said: str) -> None:
    """The whole name, as it stands in the environment; also one that is meant for something else."""
    with pytest.raises(ConfigError, match=f"^environment variable FASTDEPLOY_CACHE_{said}"):
        CacheConfig.load(environment={f"FASTDEPLOY_CACHE_{name}": value}, num_gpu_blocks=4, transfer_client="inline")


@pytest.mark.parametrize(
    ("file", "arguments", "said"),
    [
        (
            'num_gpu_blocks = 4\ngpu_memory_bytes = "1GB"\n',
            {},
            "{0}, line 1 and {0}, line 2: num_gpu_blocks and gpu_memory_bytes are given; give one of num_gpu_blocks, ",
        ),
        (
            'num_gpu_blocks = 4\n\ncpu_memory_bytes = "1GB"\nnum_cpu_blocks = 3\ncpu_to_gpu_ratio = 1.0\n',
            {},
            "{0}, line 4 and {0}, line 3 and {0}, line 5: num_cpu_blocks and cpu_memory_bytes and cpu_to_gpu_ratio ",
        ),
        (
            "",
            {"num_gpu_blocks": 4, "gpu_memory_bytes": "1GB"},
            "argument: num_gpu_blocks and gpu_memory_bytes are given;",
        ),
        ("block_size = 16\n", {}, "the size of the GPU pool is missing; give one of num_gpu_blocks, gpu_memory_bytes"),
    ],
)
def test_sizes_that_exclude_each_other_are_told_with_their_lines(
    tmp_path: Path, file: str, arguments: dict[str, Any], said: str
) -> None:
    """Where each of them stands, in the order of their names; what nobody has said stands nowhere."""
    path = tmp_path / "cache.toml"
    path.write_text(file)
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(path, environment={}, transfer_client="inline", **arguments)
    assert str(caught.value).startswith(said.format(path))


def test_the_later_source_is_blamed(tmp_path: Path) -> None:
    """An argument replaces the file's value: it is the argument that is wrong."""
    path = tmp_path / "cache.toml"
    path.write_text(FILE)
    with pytest.raises(ConfigError, match=r"^argument: transfer\.tp_size is 0; it must be at least 1"):
        CacheConfig.load(path, environment={}, transfer={"tp_size": 0})


@pytest.mark.parametrize(
    ("kind", "given", "said"),
    [
        (CacheConfig, {"num_gpu_blcks": 3}, "CacheConfig has no 'num_gpu_blcks'; did you mean 'num_gpu_blocks'"),
        (TransferConfig, {"devce": "cuda"}, "TransferConfig has no 'devce'; did you mean 'device'"),
        (StorageConfig, {"foldr": "/x"}, "StorageConfig has no 'foldr'; did you mean 'folder'"),
        (KVLayout, {"zzz": 1}, "KVLayout has no 'zzz'; use one of num_layers, num_kv_heads, "),
        (StorageConfig, {"folder": "/x"}, "StorageConfig is made without weights_id; give it"),
        (PeerConfig, {}, "PeerConfig is made without weights_id; give it"),
        (KVLayout, {"num_layers": 2}, "KVLayout is made without num_kv_heads, head_dim; give them"),
    ],
)
def test_misspelt_and_missing_names_of_a_call(kind: Any, given: dict[str, Any], said: str) -> None:
    """A call of the class itself: one of our errors, with the nearest name."""
    with pytest.raises(ConfigError, match=said):
        kind(**given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a=" + "[" * 3000 + "]" * 3000, ", line 2: it is nested too deep"),
        ("a=" + "{a=" * 3000 + "1" + "}" * 3000, ", line 2: it is nested too deep"),
        ("a=" + "{a=" * 300 + "1" + "}" * 300, ", line 2: it is nested too deep"),
        ("[" + ".".join("a" * 20_000) + "]", ", line 2: it is nested too deep"),
        (".".join("a" * 3_000) + " = 1", ", line 2: it is nested too deep"),
        ("[" + ".".join("a" * 300) + "]", ", line 2: it is nested too deep"),
        ("block_size = " + "9" * 10_000, ", line 2: a number has too many digits"),
        ("block_size = 0x" + "f" * 10_000, ", line 2: a number has too many digits"),
        ("transfer.tp_size = [1,\n" + "9" * 10_000 + "]", ": a number has too many digits"),
    ],
)
def test_what_python_cannot_take_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    """Nested too deep, or a number too long: an error about the file, with the line where one line has it."""
    path = tmp_path / "cache.toml"
    path.write_text(f"num_gpu_blocks = 4\n{text}\n")
    with pytest.raises(ConfigError) as caught:
        CacheConfig.load(path, environment={})
    assert str(caught.value) == f"cannot read configuration {path}{said}"


LINES = '''# a comment = 1
"block_size" = 16
'num_gpu_blocks' = 64  # both in quotes
namespace = """
num_cpu_blocks = 3
[storage]
"""
list = [
  1, # [peer]
  2,
]
peer.name = "x"
layout = { num_layers = 2, head_dim = 8 }

[ "transfer" ]
"tp_size" = 2
device_ids = [
  0,
]
[[many]]
many_name = 1
[[many.inner]]
name = 1
[[many]]
[[many.inner]]
[[many.inner]]
name = 2
[storage]
'folder'='/x'
'''
WHERE = {
    "block_size": 2,
    "num_gpu_blocks": 3,
    "namespace": 4,
    "list": 8,
    "peer": 12,
    "peer.name": 12,
    "layout": 13,
    "layout.num_layers": 13,
    "layout.head_dim": 13,
    "transfer": 15,
    "transfer.tp_size": 16,
    "transfer.device_ids": 17,
    "many": 20,
    "many[0]": 20,
    "many[0].many_name": 21,
    "many[0].inner": 22,
    "many[0].inner[0]": 22,
    "many[0].inner[0].name": 23,
    "many[1]": 24,
    "many[1].inner": 25,
    "many[1].inner[0]": 25,
    "many[1].inner[1]": 26,
    "many[1].inner[1].name": 27,
    "storage": 28,
    "storage.folder": 29,
}


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_each_key_has_its_line_however_it_is_written(tmp_path: Path, end: str) -> None:
    """In quotes, with dots, in inline tables, below values of many lines whose text looks like keys."""
    path = tmp_path / "cache.toml"
    path.write_bytes(LINES.replace("\n", end).encode())
    assert from_file(path).origins == {key: f"{path}, line {line}" for key, line in WHERE.items()}


def test_no_line_is_better_than_a_wrong_one(tmp_path: Path) -> None:
    """Behind a value of very many lines nothing more is looked for: the file alone is named."""
    path = tmp_path / "cache.toml"
    path.write_text("block_size = 16\nlist = [\n" + "1,\n" * 10_000 + "]\nnum_gpu_blocks = 3\n")
    origins = from_file(path).origins
    assert origins == {"block_size": f"{path}, line 1", "list": str(path), "num_gpu_blocks": str(path)}
