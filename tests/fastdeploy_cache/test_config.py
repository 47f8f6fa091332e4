"""Configuration: sources, sizes, and everything that is impossible."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig, KVLayout, PrefixCacheManager, StorageConfig, TransferConfig
from fastdeploy_cache.config.cache import check_keys
from fastdeploy_cache.config.insight import InsightConfig
from fastdeploy_cache.config.sources import ENVIRONMENT_PREFIX, from_environment
from fastdeploy_cache.errors import ConfigError, NotEnoughMemoryError

ROOT = Path(__file__).parent.parent.parent
LAYOUT = KVLayout(num_layers=2, num_kv_heads=4, head_dim=8, dtype="float16")
BLOCK_BYTES = 2 * 2 * 16 * 4 * 8 * 2  # layers, key and value, tokens, heads, head_dim, float16


def numbers_of(config: type) -> list[str]:
    """The names of a configuration's settings that are numbers."""
    return [field.name for field in dataclasses.fields(config) if re.match(r"(int|float)\b", str(field.type))]


@pytest.mark.parametrize("value", [-4, float("nan")])
@pytest.mark.parametrize("name", numbers_of(CacheConfig))
def test_a_number_that_cannot_be_is_named(name: str, value: float) -> None:
    """Whatever else is missing or wrong, the message begins with the setting that cannot be, and its value."""
    size = {} if name in ("num_gpu_blocks", "gpu_memory_bytes") else {"num_gpu_blocks": 4}
    for others in ({}, {"layout": LAYOUT}):
        with pytest.raises(ConfigError, match=f"^{name} is {value}"):
            CacheConfig(**{**size, **others, name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [-4, float("nan")])
@pytest.mark.parametrize("name", sorted({*numbers_of(StorageConfig)} - {"min_priority"}))
def test_a_number_of_storage_that_cannot_be_is_named(name: str, value: float) -> None:
    """Before any process starts. A priority may be any number."""
    with pytest.raises(ConfigError, match=f"^storage.{name} is {value}"):
        StorageConfig(**{"weights_id": "w1", "folder": "/kv", name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(("tp_size", "capacity_bytes", "least"), [(1, 4095, 4096), (2, 4095, 4096)])
def test_a_store_that_holds_no_block_is_refused(tp_size: int, capacity_bytes: int, least: int) -> None:
    """With the size that would do; of a store of any other kind it says nothing."""
    settings: dict[str, Any] = {"num_gpu_blocks": 4, "block_size": 16, "layout": LAYOUT}
    settings["transfer"] = TransferConfig(tp_size=tp_size)
    storage = StorageConfig(weights_id="w1", folder="/kv", capacity_bytes=capacity_bytes)
    with pytest.raises(ConfigError, match=f"^storage.capacity_bytes is {capacity_bytes}, .* use at least {least}$"):
        CacheConfig(storage=storage, **settings)
    CacheConfig(storage=dataclasses.replace(storage, capacity_bytes=least), **settings)
    CacheConfig(storage=dataclasses.replace(storage, kind="valkey", folder=None), **settings)


def test_later_sources_win_key_by_key(tmp_path: Path) -> None:
    """File, then environment, then arguments; tables are merged, not replaced."""
    path = tmp_path / "cache.toml"
    path.write_text("block_size = 16\nnum_gpu_blocks = 1\n[transfer]\ntp_size = 2\ndata_parallel_id = 3\n")
    environment = {
        "FASTDEPLOY_CACHE_NUM_GPU_BLOCKS": "5",
        "FASTDEPLOY_CACHE_TRANSFER__TP_SIZE": "4",
        "FASTDEPLOY_CACHE_TRANSFER__DEVICE_IDS": "3,2,1,0",
        "FASTDEPLOY_CACHE_ENABLE_PREFIX_CACHING": "false",
        "OTHER": "x",
    }
    config = CacheConfig.load(path, environment=environment, layout=LAYOUT, num_gpu_blocks=7)
    assert (config.block_size, config.num_gpu_blocks, config.enable_prefix_caching) == (16, 7, False)
    assert (config.transfer.tp_size, config.transfer.data_parallel_id) == (4, 3)
    assert config.transfer.device_ids == (3, 2, 1, 0)
    assert config.layout == LAYOUT


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({"num_gpu_blocks": 10}, (10, 0)),
        ({"num_gpu_blocks": 10, "num_cpu_blocks": 7}, (10, 7)),
        ({"num_gpu_blocks": 10, "cpu_to_gpu_ratio": 2.5}, (10, 25)),
        ({"gpu_memory_bytes": 10 * BLOCK_BYTES + 1, "cpu_memory_bytes": 3 * BLOCK_BYTES - 1}, (10, 2)),
    ],
)
def test_pools_are_sized_in_blocks_bytes_or_by_ratio(settings: dict[str, Any], sizes: tuple[int, int]) -> None:
    """Bytes are per rank and rounded down to whole blocks."""
    assert CacheConfig(block_size=16, layout=LAYOUT, **settings).pool_sizes() == sizes


def test_sizes_may_be_texts_in_a_call_too() -> None:
    """Of the cache, of a store and of what an operator sees; what is no size is refused with its name."""
    given: Any = "1MiB"
    config = CacheConfig(
        block_size=16, layout=LAYOUT, num_gpu_blocks=1, cpu_memory_bytes=given, lost_blocks_bytes=given
    )
    assert (config.cpu_memory_bytes, config.lost_blocks_bytes) == (2**20, 2**20)
    assert StorageConfig(folder="/kv", weights_id="w", capacity_bytes=given).capacity_bytes == 2**20
    assert InsightConfig(flight_recorder_bytes=given).flight_recorder_bytes == 2**20
    for bad in ("10 gigs", "many"):
        wrong: Any = bad
        with pytest.raises(ConfigError, match=f"cpu_memory_bytes is '{bad}'; give a number of bytes, .* 10GB"):
            CacheConfig(block_size=16, layout=LAYOUT, num_gpu_blocks=1, cpu_memory_bytes=wrong)


def test_a_later_source_may_give_a_size_in_another_way(tmp_path: Path) -> None:
    """The environment's blocks replace the file's ratio instead of clashing with it."""
    path = tmp_path / "cache.toml"
    path.write_text("num_gpu_blocks = 4\ncpu_to_gpu_ratio = 2.0\ntransfer_client = 'inline'\n")
    config = CacheConfig.load(path, environment={"FASTDEPLOY_CACHE_NUM_CPU_BLOCKS": "7"})
    assert config.pool_sizes() == (4, 7)


def test_only_load_reads_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that a program builds by itself is what it says, as control.md and configuration.md tell."""
    monkeypatch.setenv("FASTDEPLOY_CACHE_INSIGHT__CONTROL_SOCKET", "/run/of/others.sock")
    given = {"block_size": 16, "num_gpu_blocks": 4, "transfer_client": "inline"}
    assert CacheConfig(**given).insight.control_socket is None  # type: ignore[arg-type]
    assert CacheConfig.load(None, **given).insight.control_socket == "/run/of/others.sock"


def test_sizes_may_have_units(tmp_path: Path) -> None:
    """In a file, in the environment and as arguments, in tables and outside; what is no size is named with its key."""
    path = tmp_path / "cache.toml"
    path.write_text('gpu_memory_bytes = "1MiB"\n[storage]\nfolder = "/kv"\nweights_id = "w"\ncapacity_bytes = "10GB"')
    environment = {"FASTDEPLOY_CACHE_CPU_MEMORY_BYTES": "2M", "FASTDEPLOY_CACHE_STORAGE__SLAB_BYTES": "64 MiB"}
    config = CacheConfig.load(path, environment=environment, layout=LAYOUT, storage={"staging_bytes": "3Ki"})
    assert config.storage is not None
    assert (config.gpu_memory_bytes, config.cpu_memory_bytes) == (2**20, 2 * 10**6)
    assert (config.storage.capacity_bytes, config.storage.slab_bytes) == (10**10, 2**26)
    assert config.storage.staging_bytes == 3072
    with pytest.raises(ConfigError, match=r"storage\.slab_bytes is '64 pages'; give a number of bytes"):
        CacheConfig.load(path, environment={"FASTDEPLOY_CACHE_STORAGE__SLAB_BYTES": "64 pages"}, layout=LAYOUT)


def test_variables_of_the_log_are_no_keys() -> None:
    """They are for processes without a configuration, too; one that is nearly one of them is unknown."""
    environment = {"FASTDEPLOY_CACHE_LOG_LEVEL": "debug", "FASTDEPLOY_CACHE_LOG_FORMAT": "json"}
    assert CacheConfig.load(environment=environment, layout=LAYOUT, num_gpu_blocks=4).pool_sizes() == (4, 0)
    with pytest.raises(ConfigError, match="log_levels"):
        CacheConfig.load(environment={"FASTDEPLOY_CACHE_LOG_LEVELS": "debug"}, num_gpu_blocks=4)


def test_every_variable_of_ours_is_a_setting_or_is_left_out() -> None:
    """What programs and pages of ours name can be in the environment of any engine: no configuration refuses it."""
    files = [
        file
        for place in ("launch", "docs", "examples", "README.md", "SECURITY.md", "fastdeploy_cache/config/sources.py")
        for file in ([ROOT / place] if (ROOT / place).is_file() else (ROOT / place).rglob("*"))
        if file.suffix in (".py", ".sh", ".md", ".toml", ".yml", ".service")
    ]
    text = "".join(file.read_text() for file in files)
    named = set(re.findall(rf"{ENVIRONMENT_PREFIX}[A-Z_]*[A-Z]", text))
    named |= {f"{ENVIRONMENT_PREFIX}{end}" for end in re.findall(r'{ENVIRONMENT_PREFIX}([A-Z_]+)"', text)}
    assert {f"{ENVIRONMENT_PREFIX}{end}" for end in ("RUN_DIR", "PYTHON", "LOG_LEVEL", "LOG_FORMAT")} <= named
    check_keys(from_environment(dict.fromkeys(named, "1")).settings)


def test_bytes_are_per_rank() -> None:
    """Two ranks share the heads, so the same bytes per rank hold twice the blocks."""
    config = CacheConfig(
        block_size=16, layout=LAYOUT, gpu_memory_bytes=10 * BLOCK_BYTES, transfer=TransferConfig(tp_size=2)
    )
    assert config.pool_sizes() == (20, 0)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, "the size of the GPU pool is missing; give one of num_gpu_blocks, gpu_memory_bytes"),
        ({"num_gpu_blocks": 1, "gpu_memory_bytes": 1}, "num_gpu_blocks and gpu_memory_bytes are given; give one"),
        ({"num_gpu_blocks": 1, "num_cpu_blocks": 1, "cpu_to_gpu_ratio": 1.0}, "at most one of"),
        ({"num_gpu_blocks": 0}, "num_gpu_blocks is 0"),
        ({"num_gpu_blocks": -4}, "num_gpu_blocks is -4"),
        ({"num_gpu_blocks": 2**31}, "32 bits"),
        ({"gpu_memory_bytes": 100}, "gpu_memory_bytes 100 holds 0 blocks"),
        ({"num_gpu_blocks": 1, "num_cpu_blocks": -1}, "num_cpu_blocks is -1"),
        ({"num_gpu_blocks": 2.5}, "num_gpu_blocks is 2.5"),
        ({"num_gpu_blocks": "64"}, "num_gpu_blocks is '64'"),
        ({"num_gpu_blocks": True}, "num_gpu_blocks is True"),
        ({"gpu_memory_bytes": 1, "transfer_client": "inline", "layout": None}, "layout is missing"),
        ({"num_gpu_blocks": 1, "cpu_to_gpu_ratio": float("nan")}, "cpu_to_gpu_ratio is nan"),
        ({"num_gpu_blocks": 1, "cpu_to_gpu_ratio": float("inf")}, "cpu_to_gpu_ratio is inf"),
        ({"num_gpu_blocks": 1, "hit_rate_window_seconds": float("nan")}, "hit_rate_window_seconds is nan"),
        ({"num_gpu_blocks": 1, "layout": {"num_layers": 1}}, "give a KVLayout"),
        ({"num_gpu_blocks": 1, "block_size": 0}, "block_size is 0"),
        ({"num_gpu_blocks": 1, "block_size": 2000}, "block_size is 2000"),
        ({"num_gpu_blocks": 1, "layout": None}, "layout is missing"),
        ({"num_gpu_blocks": 1, "transfer_client": "threads"}, "'threads'"),
        ({"num_gpu_blocks": 1, "hit_rate_window_seconds": 0}, "hit_rate_window_seconds is 0"),
        ({"num_gpu_blocks": 1, "transfer": TransferConfig(tp_size=3)}, "4 KV heads neither divide by 3 ranks"),
    ],
)
def test_impossible_values_are_refused(settings: dict[str, Any], words: str) -> None:
    """Before any process starts, with the value and the remedy."""
    with pytest.raises(ConfigError, match=words):
        CacheConfig(**{"layout": LAYOUT, **settings})


def test_fewer_heads_than_ranks_are_replicated() -> None:
    """8 ranks for 4 heads: each holds one."""
    config = CacheConfig(num_gpu_blocks=1, layout=LAYOUT, block_size=16, transfer=TransferConfig(tp_size=8))
    layout = config.rank_layout()
    assert layout is not None
    assert layout.block_bytes == BLOCK_BYTES // 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_gpu_blockz": 3}, "unknown key 'num_gpu_blockz'; did you mean 'num_gpu_blocks'"),
        ({"transfer": {"tpsize": 3}}, "unknown key 'transfer.tpsize'; did you mean 'transfer.tp_size'"),
        ({"transfer": 3}, "it is a table"),
        ({"num_gpu_blocks": "lots"}, "num_gpu_blocks"),
        ({"num_gpu_blocks": 1, "transfer": {"heartbeat_seconds": 0.1}}, "heartbeat_seconds is 0.1"),
        ({"num_gpu_blocks": 1, "layout": {"num_layers": 1, "num_kv_heads": 1}}, "head_dim"),
        ({"num_gpu_blocks": 1, "layout": {"num_layers": 1, "num_kv_heads": 1, "head_dim": 0}}, "head_dim is 0"),
    ],
)
def test_unknown_keys_and_wrong_types_are_refused(arguments: dict[str, Any], words: str) -> None:
    """From any source, with the nearest right name."""
    with pytest.raises(ConfigError, match=words):
        CacheConfig.load(environment={}, **arguments)


def test_an_unknown_environment_variable_is_refused() -> None:
    """A typo in a start script does not go unnoticed."""
    with pytest.raises(ConfigError, match="did you mean 'block_size'"):
        CacheConfig.load(environment={"FASTDEPLOY_CACHE_BLOCKSIZE": "4"})


def test_more_memory_than_there_is_is_refused_before_it_is_taken() -> None:
    """A petabyte of KV: a clear error from the constructor, in either client."""
    for client in ("processes", "inline"):
        config = CacheConfig(
            block_size=16, layout=LAYOUT, num_gpu_blocks=2**30, num_cpu_blocks=2**30, transfer_client=client
        )
        with pytest.raises(NotEnoughMemoryError, match="available"):
            PrefixCacheManager(config)


@pytest.mark.parametrize("name", [item.name for item in dataclasses.fields(CacheConfig) if item.type == "int"])
def test_no_number_is_none(name: str) -> None:
    """A setting that has to be there is refused by its name where it is not."""
    with pytest.raises(ConfigError, match=rf"{name} is None; give a whole number"):
        CacheConfig(**{"num_gpu_blocks": 8, "transfer_client": "inline", name: None})  # type: ignore[arg-type]
