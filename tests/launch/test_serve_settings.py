"""What `serve` makes of a file and options that do not fit its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fastdeploy_cache import CacheConfig
from fastdeploy_cache.errors import ConfigError
from fastdeploy_cache.launch.reference_engine.weights import ModelFiles, ModelSpec
from fastdeploy_cache.launch.server.options import ServeOptions
from fastdeploy_cache.launch.server.settings import check_pool, load_config

SIZES = "block_size = 16\nnum_gpu_blocks = 8\n"


def load(path: Path | None, *settings: str) -> CacheConfig:
    spec: Any = ModelSpec.__new__(ModelSpec)
    for name, value in {"num_layers": 30, "num_kv_heads": 3, "head_dim": 64}.items():
        object.__setattr__(spec, name, value)
    files: Any = ModelFiles.__new__(ModelFiles)
    object.__setattr__(files, "spec", spec)
    return load_config(files, ServeOptions(config=path, settings=list(settings)))


@pytest.mark.parametrize(
    ("file", "settings", "said"),
    [
        (
            "[layout]\nnum_layers = 32\nnum_kv_heads = 8\n",
            (),
            "{file}, line 4: leave the table [layout] out, as serve has its model's: there num_layers is 30, and not ",
        ),
        ("", ("layout.num_layers=32",), "--set layout...: serve has its model's layout; leave it out"),
        (
            "[transfer]\ntp_size = 2\n",
            (),
            "{file}, line 4: transfer.tp_size is 2, but the model's 3 KV heads neither divide by 2 ranks nor 2 by 3",
        ),
        ("", ("transfer.tp_size=6",), "transfer.tp_size is 6; the model has 3 KV heads, so use 1 or 3"),
    ],
)
def test_settings_of_another_model(tmp_path: Path, file: str, settings: tuple[str, ...], said: str) -> None:
    """One line, which says where it stands, what the model has, and what to do."""
    path = tmp_path / "cache.toml"
    path.write_text(SIZES + file)
    with pytest.raises(ConfigError) as refused:
        load(path, *settings)
    assert str(refused.value).startswith(said.format(file=path))


def test_a_pool_that_holds_no_chat() -> None:
    """It is refused, with the least that can work and what an answer of the usual length takes; one more is taken."""
    with pytest.raises(ConfigError) as refused:
        check_pool(CacheConfig(block_size=16, num_gpu_blocks=1, transfer_client="inline"), 33)
    assert str(refused.value) == (
        "the GPU pool has 1 block of 16 tokens, and the shortest chat takes 3 with one token of its answer; use "
        "num_gpu_blocks of at least 3, or of 7 for an answer of 64 tokens, the most by default"
    )
    for size, num_tokens in ((3, 47), (4, 63)):
        check_pool(CacheConfig(block_size=16, num_gpu_blocks=size, transfer_client="inline"), num_tokens)
        with pytest.raises(ConfigError, match=f"at least {size + 1}, "):
            check_pool(CacheConfig(block_size=16, num_gpu_blocks=size, transfer_client="inline"), num_tokens + 1)


def test_a_layout_that_is_the_models(tmp_path: Path) -> None:
    """A table that says the same is no error."""
    path = tmp_path / "cache.toml"
    path.write_text(f"{SIZES}[layout]\nnum_layers = 30\nnum_kv_heads = 3\nhead_dim = 64\n")
    layout = load(path).layout
    assert layout is not None and layout.dtype == "float32"
